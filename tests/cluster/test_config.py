"""The one configuration tree: defaults work, mistakes are named."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from twinpool.cluster.config import DEFAULT_MODEL, ClusterSpec, absolute_model, cache_folder, load_spec, parse_spec
from twinpool.cluster.protocol.errors import ConfigError


def test_an_empty_spec_is_a_whole_cluster(tmp_path: Path) -> None:
    path = tmp_path / "spec.yaml"
    path.write_text("")
    assert load_spec(path) == ClusterSpec()
    assert ClusterSpec().model_name == "smollm2"


def test_yaml_and_json_say_the_same(tmp_path: Path) -> None:
    data: dict[str, Any] = {"prompt": {"num_workers": 3, "engine": {"block_size": 8}}, "model": "/models/tiny"}
    (tmp_path / "spec.json").write_text(json.dumps(data))
    (tmp_path / "spec.yaml").write_text("model: /models/tiny\nprompt: {num_workers: 3, engine: {block_size: 8}}\n")
    spec = load_spec(tmp_path / "spec.json")
    assert spec == load_spec(tmp_path / "spec.yaml")
    assert (spec.prompt.num_workers, spec.prompt.engine.block_size, spec.completion.num_workers) == (3, 8, 1)
    assert spec.model_name == "tiny"
    assert parse_spec(json.loads(spec.model_dump_json()), "itself") == spec


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"promt": {}}, "promt"),
        ({"prompt": {"engine": {"blocksize": 8}}}, "prompt.engine.blocksize"),
        ({"prompt": {"num_workers": -1}}, "prompt.num_workers"),
        ({"prompt": {"engine": {"block_size": 0}}}, "prompt.engine.block_size"),
        ({"router": {"port": 70_000}}, "router.port"),
        ({"name": "Not A Name"}, "name"),
        ({"name": "-x"}, "name"),
        ({"model": ""}, "model"),
        ({"liveness": {"gone_after_s": 1.0}}, "heartbeat_s < suspect_after_s <= gone_after_s"),
        ({"liveness": {"heartbeat_s": 2.0}}, "heartbeat_s < suspect_after_s <= gone_after_s"),
        ({"liveness": {"lease_s": 1.0}}, "renew_s < lease_s"),
        ([], "the-spec"),
        ("text", "the-spec"),
    ],
)
def test_a_mistake_is_named(data: Any, named: str) -> None:
    with pytest.raises(ConfigError, match="the-spec is not a valid cluster spec") as caught:
        parse_spec(data, "the-spec")
    assert named in str(caught.value)


@pytest.mark.parametrize(("name", "text"), [("spec.yaml", "a: [1"), ("spec.json", "{"), ("spec.yaml", "\x00")])
def test_a_file_that_cannot_be_read_as_such_is_named(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="neither YAML nor JSON"):
        load_spec(tmp_path / name)


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(ConfigError, match=r"spec\.yaml"):
        load_spec(tmp_path / "spec.yaml")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the spec .*nowhere\.yaml: No such file"):
        load_spec(tmp_path / "nowhere.yaml")


def test_a_spec_is_never_written_to() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        ClusterSpec().prompt.num_workers = 2  # type: ignore[misc]


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWINPOOL_CACHE", "/mine")
    assert cache_folder() == Path("/mine")
    monkeypatch.delenv("TWINPOOL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/twinpool")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder() == Path("/home/someone/.cache/twinpool")


def test_a_model_in_a_local_folder_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub id stays one, and so does the default model beside a folder of its name."""
    monkeypatch.chdir(tmp_path)
    for name in ("models/mine", DEFAULT_MODEL):
        Path(name).mkdir(parents=True)
    assert absolute_model("models/mine") == str(tmp_path / "models" / "mine")
    assert [absolute_model(model) for model in ("org/mine", DEFAULT_MODEL)] == ["org/mine", DEFAULT_MODEL]
