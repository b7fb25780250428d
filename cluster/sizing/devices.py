"""What accelerators and links can do at most, from `devices.json`, or from numbers of one's own."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..protocol.errors import ConfigError


@dataclass(frozen=True)
class Device:
    product: str
    flops_per_s: float  # dense BF16
    bytes_per_s: float  # of its memory
    memory_bytes: float

    def at(self, compute_efficiency: float, bandwidth_efficiency: float) -> "Device":
        """Return the same device as a program finds it that reaches only these shares of its peaks."""
        return replace(
            self,
            flops_per_s=self.flops_per_s * compute_efficiency,
            bytes_per_s=self.bytes_per_s * bandwidth_efficiency,
        )


@dataclass(frozen=True)
class Figures:
    """A user's own figures; what is None comes from the data file."""

    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    memory_bytes: float | None = None

    def given(self) -> dict[str, float]:
        return {key: value for key, value in vars(self).items() if value is not None}


def load_devices() -> dict[str, Device]:
    """Return every device of the data file by its name."""
    return {name: Device(**figures) for name, figures in _read()["devices"].items()}


def load_links() -> dict[str, float]:
    """Return the bytes per second, one way, of every link of the data file by its usual name."""
    return _read()["links"]


def find_device(name: str | None, own: Figures | None = None) -> Device:
    """Return a device by name, its figures replaced by those of `own`; without a name `own` has to have all.

    Raises ConfigError.
    """
    devices, given = load_devices(), (own or Figures()).given()
    wrong = [f"{key}={value:g}" for key, value in given.items() if not 0 < value < float("inf")]
    if wrong:
        raise ConfigError(f"a device's figures are positive numbers, not {', '.join(wrong)}")
    if name is None and len(given) == len(vars(Figures())):
        return Device("a device of your own", **given)
    if name is None or name.lower() not in devices:
        got = "no device is named" if name is None else f"there are no figures of a device {name!r}"
        raise ConfigError(
            f"{got}; known are {', '.join(devices)}",
            hint="give its peaks instead: --flops 989e12 --bandwidth 3.35e12 --memory 80e9 (FLOP/s, bytes/s, bytes)",
        )
    known = devices[name.lower()]
    return replace(known, product=f"{known.product} with figures of your own", **given) if given else known


def _read() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("devices.json").read_text())
