"""A cheap hash over a model folder, by which workers and router know that they hold the same model (I7)."""

import json
from pathlib import Path

import xxhash

SAMPLES_PER_FILE = 32
SAMPLE_BYTES = 4096
IGNORED_KEYS = ("_name_or_path", "transformers_version")  # say who saved the model, not what it is


def model_fingerprint(model_folder: Path) -> str:
    """Hash the configuration and, of each weight file, its name, size, header and samples spread over it.

    Reads well under a megabyte a file whatever the model's size. Two models that differ in a few weights between the
    samples are not told apart.
    """
    digest = xxhash.xxh3_128()
    config = json.loads((model_folder / "config.json").read_text())
    digest.update(json.dumps({k: v for k, v in config.items() if k not in IGNORED_KEYS}, sort_keys=True).encode())
    for path in sorted(model_folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}:{size}".encode())
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            digest.update(file.read(header_bytes))
            for i in range(SAMPLES_PER_FILE):
                file.seek(8 + header_bytes + (size - 8 - header_bytes) * i // SAMPLES_PER_FILE)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
