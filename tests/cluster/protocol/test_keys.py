"""Key files: what is made, what is refused, and who may speak for whom."""

import stat
from pathlib import Path

import pytest
import zmq
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.protocol.keys import load_keys, make_keys

ROLES = ["router", "prompt", "completion"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(tmp_path / "keys", ROLES)
    return tmp_path / "keys"


def secret_in(file: Path) -> str:
    return file.read_text().strip()


def test_what_is_made_can_be_loaded_and_only_its_owner_can_read_it(folder: Path) -> None:
    for name, holder in (
        ("router", "router"),
        ("router-1", "router"),
        ("prompt-7", "prompt"),
        ("completion-0", "completion"),
    ):
        ring = load_keys(folder, name)
        assert ring.own.secret.decode() == secret_in(folder / f"{holder}.key")
        assert ring.own.public == zmq.curve_public(ring.own.secret)
        assert ring.keys_of(name) == (ring.own.public,)
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in [folder, *folder.iterdir()]}
    assert modes == {"keys": 0o700, "allowed": 0o700, "router.key": 0o400, "prompt.key": 0o400, "completion.key": 0o400}


def test_keys_are_never_overwritten(folder: Path, tmp_path: Path) -> None:
    before = {file: file.read_bytes() for file in folder.glob("*.key")}
    for there in (folder, folder / "router.key"):
        with pytest.raises(ConfigError, match="is there already"):
            make_keys(there, ROLES)
    assert {file: file.read_bytes() for file in folder.glob("*.key")} == before
    (tmp_path / "empty").mkdir(mode=0o755)
    make_keys(tmp_path / "empty", ROLES)
    assert stat.S_IMODE((tmp_path / "empty").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o440, 0o404, 0o600 | 0o020, 0o644])
def test_a_secret_that_others_can_read_is_refused(folder: Path, mode: int) -> None:
    (folder / "router.key").chmod(mode)
    with pytest.raises(ConfigError, match=rf"router\.key: its mode is {mode:04o}, allowed are 0400 and 0600") as caught:
        load_keys(folder, "router")
    assert "hint: chmod 400" in str(caught.value)
    assert load_keys(folder, "prompt-0"), "the others' secrets are not this process's affair"


def test_a_secret_is_never_shown(folder: Path) -> None:
    """Not by a repr in a traceback, and not by an error about it."""
    secret = secret_in(folder / "prompt.key")
    assert secret not in repr(load_keys(folder, "prompt-0"))
    (folder / "prompt.key").chmod(0o600)
    for text in (secret[:-1], secret + "0", f"{secret} {secret}", f"{secret}\n{secret[::-1]}"):
        (folder / "prompt.key").write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_keys(folder, "prompt-0")
        assert secret[:10] not in str(caught.value)
        assert secret[::-1][:10] not in str(caught.value)


def test_who_is_not_among_the_allowed_is_told_before_others_refuse_it(folder: Path) -> None:
    (folder / "allowed" / "prompt.pub").write_bytes(zmq.curve_keypair()[0])
    with pytest.raises(ConfigError, match=r"the public half of .*prompt\.key is not among those of prompt-3 "):
        load_keys(folder, "prompt-3")


@pytest.mark.parametrize("name", ["decode_worker", "prompt-", "prompt-x", "../router", "prompt-0-1", ""])
def test_a_name_without_a_role_has_no_keys(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="has no keys"):
        load_keys(folder, name)


@pytest.mark.parametrize("line", ["x" * 40 + "y", "x" * 39, "%" * 40, "ä" * 40, "a b" * 10], ids=str)
def test_a_line_that_is_no_key_is_named(folder: Path, line: str) -> None:
    """Forty `%` would stand for numbers that no four bytes hold."""
    with (folder / "allowed" / "prompt.pub").open("a") as file:
        file.write(f"# of yesterday\n{line}\n")
    with pytest.raises(ConfigError, match=r"prompt\.pub, line 3: not a key"):
        load_keys(folder, "prompt-0")


def test_a_file_that_names_nobody_and_a_key_with_two_owners_are_refused(folder: Path) -> None:
    stray = folder / "allowed" / "worker.pub"
    stray.write_bytes(zmq.curve_keypair()[0])
    with pytest.raises(ConfigError, match=r"worker\.pub names nobody"):
        load_keys(folder, "router")
    stray.rename(folder / "allowed" / "prompt-1.pub").write_bytes((folder / "allowed" / "prompt.pub").read_bytes())
    with pytest.raises(ConfigError, match="prompt and prompt-1 have the same key"):
        load_keys(folder, "router")


@pytest.mark.parametrize("missing", ["prompt.key", "allowed/router.pub"])
def test_a_folder_without_keys_is_named_with_the_remedy(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    if missing == "allowed/router.pub":
        assert load_keys(folder, "prompt-0").towards("router").allowed == ()
        for file in (folder / "allowed").iterdir():
            file.unlink()
    with pytest.raises(ConfigError, match=r"holds no (public )?key.*\nhint: `twinpool keys"):
        load_keys(folder, "prompt-0")


def test_old_and_new_keys_are_known_together_in_their_order(folder: Path) -> None:
    public = zmq.curve_keypair()[0]
    old = (folder / "allowed" / "prompt.pub").read_bytes()
    (folder / "allowed" / "prompt.pub").write_bytes(b"# new\n" + public + b"\n\n# old\n" + old)
    ring = load_keys(folder, "prompt-0")
    assert ring.keys_of("prompt-1") == (public, old.strip())
    assert ring.admitted("prompt") == {public: "prompt", old.strip(): "prompt"}


def test_a_worker_with_a_key_of_its_own_is_not_spoken_for_by_its_role(tmp_path: Path) -> None:
    made = make_keys(tmp_path / "keys", [*ROLES, "prompt-0"])
    ring = load_keys(tmp_path / "keys", "prompt-0")
    assert [key.decode() for key in ring.keys_of("prompt-0")] == [made["prompt-0"]]
    assert [key.decode() for key in ring.keys_of("prompt-1")] == [made["prompt"]]
    holders = [*ROLES, "prompt-0", "prompt-1"]
    may_speak = {name: {holder for holder in holders if ring.speaks_for(holder, name)} for name in holders[1:]}
    assert may_speak == {
        "prompt": {"prompt"},
        "completion": {"completion"},
        "prompt-0": {"prompt-0"},
        "prompt-1": {"prompt"},
    }
    assert set(ring.admitted("prompt", "completion").values()) == {"prompt", "completion", "prompt-0"}
