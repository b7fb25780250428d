"""Constants by hand: each key of a profile sets what the profile would; anything else is refused by name."""

import pytest
from twinpool.cluster.cost_profile import Constants, WorkerCapacity
from twinpool.cluster.costs import Capacity, CostModel, DecodeCost
from twinpool.cluster.protocol.errors import ConfigError
from twinpool.cluster.sizing.overrides import override


def test_the_costs_follow_from_the_constants() -> None:
    model = override(
        CostModel(),
        ["prefill_overhead_s=0.031914", "prefill_per_token_s = 55.444e-6", "decode_base_s=0.038283", "fuse=sum"],
    )
    assert model.prefill_s(8192) == pytest.approx(0.48611, abs=5e-6)
    assert model.fused_s([(0, 256)], 1, 0) == pytest.approx(model.prefill_s(256) + 0.038283)


def test_what_is_not_set_stays_and_the_last_one_holds() -> None:
    model = CostModel(decode=DecodeCost(1.0, 2.0, 3.0), transfer_latency_s=4.0)
    changed = override(model, ["decode_per_sequence_s=5", "decode_per_sequence_s=6"])
    assert changed == CostModel(decode=DecodeCost(1.0, 6.0, 3.0), transfer_latency_s=4.0)
    assert override(model, []) == model


def test_every_key_of_a_profile_can_be_set() -> None:
    """The keys are taken from the profile's own fields, so that a new constant cannot be forgotten here."""
    keys = [*Constants.model_fields, "kv_bytes_per_token", "decode_knee_sequences"]
    keys += [f"{side}.{key}" for side in ("prompt", "completion") for key in WorkerCapacity.model_fields]
    model = override(CostModel(), [f"{key}=2" for key in keys])
    assert model.decode == model.decode_large == DecodeCost(2.0, 2.0, 2.0)
    assert model.prompt == model.completion == Capacity(2, 2, 2, 2)
    assert (model.transfer_bytes_per_s, model.prefill_contention, model.decode_contention) == (0.5, 2.0, 2.0)
    assert (model.prefill_floor_s, model.request_overhead_s, model.kv_bytes_per_token) == (2.0, 2.0, 2)
    assert override(model, ["transfer_s_per_byte=0"]).transfer_s(1000) == 2.0


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("prefill_per_token_s", r"is not KEY=VALUE"),
        ("prefil_per_token_s=1", r"no constant 'prefil_per_token_s'\nhint: there are prefill_per_token_s"),
        ("zzz=1", r"hint: there are prefill_floor_s, prefill_overhead_s"),
        ("decode_base_s=-1", r"decode_base_s is '-1', must be a number of at least 0"),
        ("decode_base_s=nan", r"must be a number"),
        ("decode_base_s=inf", r"must be a number"),
        ("decode_base_s=ten", r"must be a number"),
        ("decode_contention_ratio=0.5", r"must be a number of at least 1"),
        ("prompt.num_blocks=0", r"prompt.num_blocks is '0', must be a whole number of at least 1"),
        ("completion.max_num_seqs=1.5", r"must be a whole number"),
        ("fuse=min", r"fuse is 'min', must be one of max, sum, roofline"),
        ("decode_large_base_s=1", r"come together or not at all"),
        ("decode_knee_sequences=8", r"come together or not at all"),
    ],
)
def test_wrong_constants_are_refused_by_name(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        override(CostModel(), [assignment])
