"""`twinpool explain`: its figures, its tables, its help, and how it refuses."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Protocol

import pytest
from cost_profiles import cost_profile, refused
from twinpool.cluster.cli import build_app
from twinpool.cluster.launch.roles import Programs
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.sizing.devices import load_devices, load_links
from typer.testing import CliRunner

LLAMA_8B = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


class User(Protocol):
    """See conftest.py."""

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]": ...


@pytest.fixture
def llama(tmp_path: Path) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_8B))
    return str(path)


def explain(*arguments: str, width: int = 200) -> str:
    """Run the command in this process; its errors are raised."""
    result = CliRunner(env={"COLUMNS": str(width)}).invoke(build_app(Programs()), ["explain", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.output


def figures(*arguments: str) -> dict[str, Any]:
    return json.loads(explain(*arguments, "--json"))


def test_the_published_figures_of_an_8b_model_on_an_h100(llama: str) -> None:
    """The worked example rounds its parameters to 8.0e9; the config's are 0.4 % more."""
    answer = figures(llama, "--device", "h100", "--batch", "1", "--batch", "200")
    alone, together = answer["decode"]
    assert answer["device"]["ridge_flops_per_byte"] == pytest.approx(295.2, abs=0.05)
    assert answer["model"]["kv_bytes_per_token"] == 131_072
    assert answer["max_sequences"] == 213
    assert alone["ideal_tokens_per_s"] == pytest.approx(206, rel=0.005)
    assert together["ideal_tokens_per_s"] / 200 == pytest.approx(49, rel=0.005)
    assert together["intensity_flops_per_byte"] == pytest.approx(46.8, rel=0.005)
    assert alone["expected_step_s"] == pytest.approx(0.00607, rel=0.005)
    by_length = {row["num_tokens"]: row for row in answer["prefill"]}
    assert by_length[2000]["expected_s"] == pytest.approx(0.0557, rel=0.005)
    assert by_length[8000]["attention_share"] == pytest.approx(0.131, rel=0.005)
    assert {row["chunk_tokens"]: row["num_passes"] for row in answer["chunks"]}[512] == 4
    transfers = {row["link"]: row["transfer_s"] for row in answer["transfer"]}
    assert set(transfers) == set(load_links())
    assert transfers["200 Gb/s InfiniBand"] == pytest.approx(0.0105, rel=0.005)


def test_gaps_lie_between_a_free_ride_and_a_sum(llama: str) -> None:
    """With 8000 tokens, chunks of 512 and one stream: 14 ms for a chunk, 20 ms for both in turn."""
    answer = figures(llama, "--device", "h100", "--prompt", "8000", "--batch", "1")
    row = next(row for row in answer["chunks"] if row["chunk_tokens"] == 512)
    assert row["num_passes"] == 16
    assert row["expected_gap_max_s"] == row["expected_chunk_s"] == pytest.approx(0.014, rel=0.01)
    assert row["expected_gap_sum_s"] == pytest.approx(0.020, rel=0.02)


def test_the_default_batches_end_with_the_largest_that_fits(llama: str) -> None:
    answer = figures(llama, "--device", "h100")
    assert [row["num_sequences"] for row in answer["decode"]] == [1, 8, 32, 128, 213]


def test_efficiencies_are_shares_of_the_peaks(llama: str) -> None:
    answer = figures(llama, "--device", "h100", "--compute-efficiency", "1", "--bandwidth-efficiency", "0.5")
    short, *long = answer["prefill"]
    assert all(row["expected_s"] == row["ideal_s"] for row in long)
    assert short["num_tokens"] == 500  # below the knee at half the bandwidth: bound by the read of 16 GB
    assert short["expected_s"] == pytest.approx(16.06e9 / (0.5 * 3.35e12), rel=0.001)
    assert answer["decode"][0]["expected_step_s"] == pytest.approx(2 * answer["decode"][0]["ideal_step_s"])


def test_a_device_of_ones_own(llama: str) -> None:
    own = ("--flops", "989e12", "--bandwidth", "3.35e12", "--memory", "80e9")
    assert figures(llama, *own)["decode"] == figures(llama, "--device", "h100")["decode"]


def test_a_profile_adds_measured_times_and_the_reading_of_the_chunk(llama: str, tmp_path: Path) -> None:
    """Overhead 29.03 of a step of 35.73 ms: C* is 121 and says split; what was refused is named with its bound."""
    profile = cost_profile(
        model="8B",
        kv_bytes_per_token=131_072,
        prefill_overhead_s=29.03e-3,
        prefill_per_token_s=55.2e-6,
        decode_base_s=35.73e-3,
        decode_per_sequence_s=0.0,
        decode_per_cached_token_s=refused(0.0),
        transfer_s_per_byte=0.0,
    )
    profile.save(tmp_path / "costs.json")
    arguments = (llama, "--device", "h100", "--batch", "1", "--costs", str(tmp_path / "costs.json"))
    answer = figures(*arguments)
    row = answer["decode"][0]
    assert row["measured_chunk_tokens"] == pytest.approx(121.4, abs=0.1)
    assert row["measured_overhead_share"] == pytest.approx(0.81, abs=0.005)
    assert row["measured_reading"] == "split"
    whole, chunked = (next(r for r in answer["chunks"] if r["chunk_tokens"] == size) for size in (2048, 256))
    extra_s = chunked["measured_prefill_s"] - whole["measured_prefill_s"]
    assert extra_s == pytest.approx(7 * 29.03e-3)
    assert answer["transfer"][-1]["link"] == "as measured"
    assert answer["costs"]["bounds"] == {"decode_per_cached_token_s": 0.0}
    shown = explain(*arguments)
    assert "split" in shown
    assert "decode_per_cached_token_s" in shown


def test_the_tables_say_what_is_ideal_and_what_is_expected(llama: str) -> None:
    shown = explain(llama, "--device", "h100")
    assert "ceilings that nothing exceeds" in shown
    assert "60% of its FLOP/s, 80% of its bytes/s" in shown
    assert "128 KiB" in shown
    assert "213 sequences of 2,000 tokens fit" in shown
    assert all(link in shown for link in load_links())
    for title in ("Decode with", "Prefill in one pass", "in chunks", "Transfer of the KV"):
        assert title in shown


@pytest.mark.parametrize("width", [80, 100])
def test_the_tables_fit_a_terminal(llama: str, tmp_path: Path, width: int) -> None:
    """With a profile the decode table had twelve columns, each cut to a few characters."""
    cost_profile(kv_bytes_per_token=131_072).save(tmp_path / "costs.json")
    many = ("--batch", "1", "--batch", "1000", "--prompt", "100000", "--costs", str(tmp_path / "costs.json"))
    shown = explain(llama, "--device", "h100", *many, width=width)
    assert "…" not in shown
    assert all(len(line) <= width for line in shown.splitlines())
    assert re.search(r"batch +FLOP/byte +tok/s each +in all +C\* +overhead +reading", shown)
    measured = [line.split() for line in shown.splitlines() if line.split()[:1] == ["measured"] and "%" in line]
    assert [len(cells) for cells in measured] == [6, 6]


def test_a_chunk_that_does_not_exist_is_no_negative_number(llama: str, tmp_path: Path) -> None:
    """A pass's overhead is longer than a decode step, so not one token rides along in its time."""
    cost_profile(kv_bytes_per_token=131_072, prefill_overhead_s=5.0).save(tmp_path / "costs.json")
    shown = explain(llama, "--device", "h100", "--batch", "1", "--costs", str(tmp_path / "costs.json"))
    (row,) = [line.split() for line in shown.splitlines() if line.split()[:1] == ["measured"] and "split" in line]
    assert row[3] == "none"


def test_a_batch_and_a_model_that_do_not_fit_are_marked(llama: str) -> None:
    assert "no room" in explain(llama, "--device", "h100", "--batch", "300")
    assert "no room" not in explain(llama, "--device", "h100", "--batch", "200")
    shown = explain(llama, "--device", "h100", "--memory", "10e9")
    assert "0 sequences" in shown
    assert "several devices" in shown


def test_the_help_names_every_device() -> None:
    shown = explain("--help").replace("\n", " ")
    assert all(name in shown for name in load_devices())


def test_a_profile_of_another_model_is_refused(llama: str, tmp_path: Path) -> None:
    cost_profile(kv_bytes_per_token=23_040).save(tmp_path / "costs.json")
    with pytest.raises(ConfigError, match=r"kv_bytes_per_token is 23040(.|\n)*131072"):
        explain(llama, "--device", "h100", "--costs", str(tmp_path / "costs.json"))


def test_a_profile_in_which_tokens_cost_nothing_is_refused(llama: str, tmp_path: Path) -> None:
    """C* would be infinite."""
    cost_profile(kv_bytes_per_token=131_072, prefill_per_token_s=0.0).save(tmp_path / "costs.json")
    with pytest.raises(ConfigError, match="no time"):
        explain(llama, "--device", "h100", "--costs", str(tmp_path / "costs.json"))


def test_errors_are_one_message_with_a_hint(user: User, llama: str) -> None:
    done = user.run("explain", llama, "--device", "abacus")
    assert done.returncode == 2
    assert done.stdout == ""
    assert "'abacus'" in done.stderr
    assert "hint:" in done.stderr
    assert "Traceback" not in done.stderr
