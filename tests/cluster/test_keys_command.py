"""`twinpool keys`, and what `up` makes of the folder: it is checked before anything is started."""

import json
import stat
from pathlib import Path

import pytest
from twinpool.cluster.cli import build_app
from twinpool.cluster.commands.keys import holders
from twinpool.cluster.commands.up import SpecFlags, build_spec
from twinpool.cluster.launch.roles import Programs
from twinpool.cluster.launch.start import UpOptions, start_launcher
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.protocol.keys import load_keys, make_keys
from typer.testing import CliRunner


def secrets_in(folder: Path) -> list[str]:
    return [file.read_text().strip() for file in folder.glob("*.key")]


@pytest.mark.parametrize("flags", [[], ["--json"], ["--prompt-workers", "2", "--completion-workers", "1"]])
def test_it_makes_keys_for_every_role_and_shows_public_halves_only(tmp_path: Path, flags: list[str]) -> None:
    folder = tmp_path / "keys"
    shown = CliRunner().invoke(build_app(Programs()), ["keys", str(folder), *flags])
    assert shown.exit_code == 0, shown.output
    assert len(secrets_in(folder)) == (4 if len(flags) > 1 else 3)
    assert [secret for secret in secrets_in(folder) if secret in shown.output] == []
    assert {stat.S_IMODE(file.stat().st_mode) for file in folder.glob("*.key")} == {0o400}
    for name in ("router", "prompt-1", "completion-0"):
        assert load_keys(folder, name).own.public.decode() in shown.output
    if flags == ["--json"]:
        made = {key["holder"]: key for key in json.loads(shown.stdout)["keys"]}
        assert made["prompt"]["public_key"] == load_keys(folder, "prompt-0").own.public.decode()
        assert made["prompt"]["secret_file"] == str(folder / "prompt.key")


def test_it_overwrites_nothing(tmp_path: Path) -> None:
    make_keys(tmp_path / "keys", ["router"])
    before = secrets_in(tmp_path / "keys")
    shown = CliRunner().invoke(build_app(Programs()), ["keys", str(tmp_path / "keys")])
    assert isinstance(shown.exception, ConfigError)  # exit code 2, see cli.run
    assert secrets_in(tmp_path / "keys") == before


def test_a_pool_of_a_given_size_has_a_pair_a_worker() -> None:
    assert holders(None, None) == ["router", "prompt", "completion"]
    assert holders(2, None) == ["router", "prompt-0", "prompt-1", "completion"]
    assert holders(None, 1) == ["router", "prompt", "completion-0"]


def test_up_takes_the_folder_from_a_flag_or_from_the_spec(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text("security: {keys_folder: from-spec}")
    assert build_spec(tmp_path / "spec.yaml", SpecFlags()).security.keys_folder == "from-spec"
    assert build_spec(tmp_path / "spec.yaml", SpecFlags(keys=Path("given"))).security.keys_folder == "given"


def test_up_refuses_before_it_starts_anything_when_a_worker_would_find_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWINPOOL_CACHE", str(tmp_path / "cache"))
    make_keys(tmp_path / "keys", ["router", "prompt-0", "completion"])
    spec = build_spec(None, SpecFlags(keys=tmp_path / "keys", prompt_workers=2, port=0))
    with pytest.raises(ConfigError, match=r"holds no key for prompt-1: .*\nhint: `twinpool keys"):
        start_launcher(UpOptions(spec))
