"""What every benchmark prints around its figures: hardware, command, medians, spread; and a cluster to ask."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx

TWINPOOL = str(Path(sys.executable).with_name("twinpool"))


def print_header(title: str) -> None:
    cpu = next((line.split(":")[1].strip() for line in _cpuinfo() if line.startswith("model name")), platform.machine())
    print(title)
    print(f"  hardware: {cpu}, {os.cpu_count()} cores")
    print(f"  command:  python {' '.join(sys.argv)}")
    print(f"  load before the run: {os.getloadavg()[0]:.2f}")


def spread(values: Sequence[float], unit: str = "s", digits: int = 3) -> str:
    """Return `median (least to most, n)`."""
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.{digits}f} {unit} ({low:.{digits}f} to {high:.{digits}f}, n={len(values)})"


@contextmanager
def running_cluster(spec: dict[str, Any]) -> Iterator[httpx.Client]:
    """Start a cluster with `twinpool up`, yield a client of its endpoint, stop it on every path."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "spec.json"
        path.write_text(json.dumps({"name": "benchmark", **spec, "router": {"port": 0}}))
        up = subprocess.run([TWINPOOL, "up", str(path), "--detach", "--json"], check=True, stdout=subprocess.PIPE)
        endpoint: str = json.loads(up.stdout)["endpoint"]
        try:
            with httpx.Client(base_url=endpoint, timeout=300.0) as client:
                yield client
        finally:
            subprocess.run([TWINPOOL, "down", "--name", "benchmark"], check=True, stdout=subprocess.DEVNULL)


def stream_times(client: httpx.Client, body: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Send a streamed completion; yield (seconds since the request was sent, chunk)."""
    began_s = time.perf_counter()
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield time.perf_counter() - began_s, json.loads(line.removeprefix("data: "))


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
