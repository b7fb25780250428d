"""The stages of a request lie end to end: they add up to the TTFT, and with what follows to the whole (I5)."""

import pytest
from hypothesis import given, strategies as st
from twinpool.cluster.metrics import STAGES, Timeline

SECONDS = st.floats(0, 100)


def timeline(lengths: list[float], last_kv_s: float | None, second_token_s: float | None, rest_s: float) -> Timeline:
    queue_s, grant_s, prefill_queue_s, prefill_s, return_s = lengths
    return Timeline(
        queue_s=queue_s,
        grant_s=grant_s,
        prefill_queue_s=prefill_queue_s,
        prefill_s=prefill_s,
        return_s=return_s,
        num_prompt_tokens=8,
        num_output_tokens=3,
        num_cached_tokens=0,
        num_attempts=1,
        num_preemptions=0,
        num_kv_bytes=1000,
        num_kv_bytes_arrived=900,
        last_kv_s=last_kv_s,
        second_token_s=second_token_s,
        end_s=sum(lengths) + (second_token_s or 0.0) + rest_s,
    )


@given(st.lists(SECONDS, min_size=5, max_size=5), st.none() | st.floats(-50, 50), st.none() | SECONDS, SECONDS)
def test_stages_add_up(lengths: list[float], last_kv_s: float | None, second_token_s: float | None, r: float) -> None:
    """Also when the KV was there before the first token, or when a later attempt brought the second one before it."""
    made = timeline(lengths, last_kv_s, second_token_s, r)
    stages = dict(made.stages())
    assert list(stages) == list(STAGES[: len(stages)])
    assert sum(stages[name] for name in STAGES[:5]) == pytest.approx(made.ttft_s)
    if second_token_s is None:
        assert len(stages) == 5
    else:
        assert stages["transfer"] + stages["first_decode"] == pytest.approx(second_token_s)
        assert sum(stages.values()) == pytest.approx(made.end_s)
        assert min(stages["transfer"], stages["first_decode"]) >= 0


def test_the_transfer_is_what_the_prefill_did_not_hide() -> None:
    lengths = [0.0, 0.0, 0.0, 1.0, 0.0]
    assert timeline(lengths, -0.2, 0.5, 1.0).transfer_s == 0.0
    late = timeline(lengths, 0.2, 0.5, 1.0)
    assert (late.transfer_s, late.first_decode_s) == (0.2, pytest.approx(0.3))
