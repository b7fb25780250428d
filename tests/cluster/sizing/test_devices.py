"""Device figures: by name, from one's own numbers, and what is refused."""

import pytest
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.sizing.devices import Device, Figures, find_device, load_devices, load_links


def test_every_device_of_the_file_is_complete_and_plausible() -> None:
    """All GPUs in the file are balanced for hundreds of FLOPs a byte; a misplaced power of ten is not."""
    devices = load_devices()
    assert len(devices) >= 11
    for name, device in devices.items():
        assert name == name.lower()
        assert 80 <= device.flops_per_s / device.bytes_per_s <= 450, name
        assert 0.005 <= device.memory_bytes / device.bytes_per_s <= 0.1, name


def test_every_link_is_named_by_its_rate() -> None:
    """Network links are sold in Gb/s, one way: eight times their GB/s."""
    for name, bytes_per_s in load_links().items():
        if "Gb/s" in name:
            assert float(name.split()[0]) == bytes_per_s * 8 / 1e9


def test_a_device_is_found_by_name_in_any_case() -> None:
    assert find_device("H100") == load_devices()["h100"]


def test_own_figures_replace_those_of_the_file() -> None:
    device = find_device("h100", Figures(memory_bytes=94e9))
    assert (device.flops_per_s, device.bytes_per_s, device.memory_bytes) == (989e12, 3.35e12, 94e9)
    assert "your own" in device.product


def test_own_figures_suffice_when_all_are_given() -> None:
    assert find_device(None, Figures(1e12, 2e11, 3e10)) == Device("a device of your own", 1e12, 2e11, 3e10)


@pytest.mark.parametrize("name", ["h1000", None])
def test_an_unknown_device_is_refused_with_what_is_known(name: str | None) -> None:
    with pytest.raises(ConfigError) as refused:
        find_device(name, Figures(flops_per_s=1e12))
    assert all(known in str(refused.value) for known in load_devices())
    assert "--bandwidth" in str(refused.value)
    assert name is None or repr(name) in str(refused.value)


@pytest.mark.parametrize("wrong", [0.0, -1.0, float("inf"), float("nan")])
def test_figures_are_positive_numbers(wrong: float) -> None:
    with pytest.raises(ConfigError, match="bytes_per_s"):
        find_device("h100", Figures(bytes_per_s=wrong))
