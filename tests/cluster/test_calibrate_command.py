"""What `twinpool calibrate` shows: every constant, how to read C*, and what was refused and why."""

import json
import re
from io import StringIO
from pathlib import Path

import pytest
from cost_profiles import cost_profile, measured, refused
from rich.console import Console
from simulated_prober import SimulatedProber
from twinpool.cluster.commands.calibrate import readings, show_profile
from twinpool.cluster.commands.output import check_writable
from twinpool.cluster.cost_profile import CostProfile
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.sizing.calibrate import Options, calibrate


def shown(profile: CostProfile) -> str:
    text = StringIO()
    show_profile(profile, Console(file=text, width=160))
    return text.getvalue()


def test_every_constant_is_shown_with_its_spread_and_status() -> None:
    profile = calibrate(SimulatedProber(), Options(), "2026-01-02T03:04:05+00:00", lambda what, share: None)
    text = shown(profile)
    for key, constant in profile.constants.items():
        (row,) = [line for line in text.splitlines() if line.split()[:1] == [key]]
        assert constant.status in row
        assert str(constant.n) in row
    assert "smollm2 in bfloat16 on here" in text
    assert "fused passes follow roofline (off by: max" in text
    assert "a COMPLETION worker holds 46,592 tokens of KV in 1,456 blocks, 32 sequences" in text


def test_what_was_refused_is_shown_as_a_bound_with_its_reason() -> None:
    text = shown(cost_profile(decode_per_cached_token_s=refused(4.7e-7)))
    (row,) = [line for line in text.splitlines() if line.split()[:1] == ["decode_per_cached_token_s"]]
    assert "≤ 470 ns" in row
    assert "decode_per_cached_token_s: refused, the noise is larger than the effect" in text


def test_chunks_are_read_at_one_sequence_and_at_the_live_batch() -> None:
    """The laptop of the literature: C* is 121 tokens beside one sequence, and 81 % of its step is overhead: split."""
    laptop = cost_profile(
        prefill_overhead_s=29.03e-3,
        prefill_per_token_s=55.2e-6,
        decode_base_s=35.73e-3,
        decode_per_sequence_s=measured(0.0),
        decode_per_cached_token_s=measured(0.0),
    )
    one, *_, full = readings(laptop)
    assert (one["num_sequences"], full["num_sequences"]) == (1, 64)
    assert one["chunk_tokens"] == pytest.approx(121.4, abs=0.1)
    assert one["overhead_share"] == pytest.approx(0.8125, abs=1e-4)
    assert one["reading"] == "split"
    assert "C* = 121 tokens beside 1 sequence with" in shown(laptop)
    assert "overhead 81% of it" in shown(laptop)
    gpu = cost_profile(prefill_overhead_s=1e-3, prefill_per_token_s=1e-5, decode_base_s=10e-3)
    assert [reading["reading"] for reading in readings(gpu)] == ["chunk"] * 3


def test_a_chunk_that_does_not_exist_is_no_number_in_json() -> None:
    slow = cost_profile(prefill_overhead_s=0.5)
    assert {reading["prefill_stretch"] for reading in readings(slow)} == {None}
    json.dumps(readings(slow), allow_nan=False)
    assert "no chunk is that short → split" in shown(slow)
    assert "C* = none beside 1 sequence with" in shown(slow)


def test_one_of_a_kind_is_told_in_the_singular() -> None:
    profile = cost_profile()
    single = profile.completion.model_copy(update={"max_num_seqs": 1, "num_blocks": 1, "block_size_tokens": 1})
    one = {"fingerprint": profile.fingerprint.model_copy(update={"num_threads": 1}), "completion": single}
    text = shown(profile.model_copy(update=one))
    assert ", 1 thread, engine" in text
    assert "1 token of KV in 1 block, 1 sequence, and" in text
    assert not re.search(r"\b1 [a-z]{3,}s\b", text)


def test_an_output_that_cannot_be_written_is_refused_before_anything_is_timed(tmp_path: Path) -> None:
    check_writable(tmp_path / "costs.json", "--output")
    for wrong in (tmp_path, tmp_path / "missing" / "costs.json"):
        with pytest.raises(ConfigError, match="cannot be written"):
            check_writable(wrong, "--output")
