"""A profile says what was measured and of what; what it refuses still counts, and what is wrong in a file is named."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest
from cost_profiles import cost_profile, measured, refused
from pydantic import ValidationError
from twinpool.cluster.cost_profile import Constant, check_fingerprint, load_profile
from twinpool.cluster.protocol.errors import ConfigError

LARGE = {
    "decode_large_base_s": 0.004,
    "decode_large_per_sequence_s": 2e-4,
    "decode_large_per_cached_token_s": 1e-7,
}


def test_a_profile_comes_back_from_its_file(tmp_path: Path) -> None:
    profile = cost_profile(decode_per_cached_token_s=refused(5e-7), prefill_overhead_s=measured(0.02, 0.003))
    profile.save(tmp_path / "costs.json")
    assert load_profile(tmp_path / "costs.json") == profile
    assert "decode_per_cached_token_s" in json.loads((tmp_path / "costs.json").read_text())["constants"]


def test_what_was_refused_is_planned_with_its_bound_and_not_with_zero() -> None:
    model = cost_profile(decode_per_cached_token_s=refused(5e-7)).model()
    assert model.decode.per_cached_token_s == 5e-7
    assert model.decode_s(1, 100_000) == pytest.approx(0.010 + 5e-5 + 0.05)


def test_draws_stay_within_what_was_measured() -> None:
    profile = cost_profile(prefill_overhead_s=measured(0.02, 0.003), decode_per_cached_token_s=refused(5e-7))
    draws = [profile.draw(Random(seed)) for seed in range(200)]
    overheads = [model.prefill_overhead_s for model in draws]
    assert 0.017 <= min(overheads) < 0.018
    assert 0.022 < max(overheads) <= 0.023
    slopes = [model.decode.per_cached_token_s for model in draws]
    assert 0 <= min(slopes) < 1e-7
    assert 4e-7 < max(slopes) <= 5e-7
    assert profile.draw(Random(7)) == profile.draw(Random(7))


def test_a_second_regime_comes_whole_or_not_at_all() -> None:
    base = cost_profile().model_dump()
    constants = base["constants"] | {key: measured(value).model_dump() for key, value in LARGE.items()}
    whole = type(cost_profile()).model_validate(base | {"constants": constants, "decode_knee_sequences": 32})
    assert whole.model().decode_s(32, 0) == pytest.approx(0.004 + 32 * 2e-4)
    assert whole.model().decode_s(31, 0) == pytest.approx(0.010 + 31 * 5e-5)
    for broken in (
        base | {"decode_knee_sequences": 32},
        base | {"constants": constants},
        base | {"constants": constants | {"decode_large_base_s": None}, "decode_knee_sequences": 32},
    ):
        with pytest.raises(ValidationError, match="come together or not at all"):
            type(cost_profile()).model_validate(broken)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"status": "measured", "n": 3}, "a measured constant needs its median"),
        ({"status": "refused", "n": 3}, "a refused constant needs its upper_bound"),
        ({"status": "measured", "median": -1e-9, "n": 3}, "greater than or equal to 0"),
        ({"status": "measured", "median": float("inf"), "n": 3}, "finite"),
    ],
)
def test_no_constant_is_incomplete_negative_or_infinite(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        Constant.model_validate(fields)


def test_constants_of_another_model_are_refused_with_key_and_both_values() -> None:
    profile = cost_profile(model="smollm2")
    check_fingerprint(profile, profile.fingerprint)
    check_fingerprint(profile, {"model": "smollm2", "dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="model: measured with smollm2, asked for llama") as refusal:
        check_fingerprint(profile, {"model": "llama", "dtype": "bfloat16"})
    assert "dtype" not in str(refusal.value)
    with pytest.raises(ConfigError, match="num_threads: measured with 1, asked for 2"):
        check_fingerprint(profile, profile.fingerprint.model_copy(update={"num_threads": 2}))


def test_what_is_wrong_in_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    with pytest.raises(ConfigError, match="cannot read the cost profile"):
        load_profile(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_profile(path)
    data = cost_profile().model_dump(mode="json")
    data["constants"]["decode_base_s"]["median"] = "fast"
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"constants\.decode_base_s\.median"):
        load_profile(path)


def test_a_profile_may_say_what_its_cluster_was_started_with(tmp_path: Path) -> None:
    """Profiles without it stay readable; what is there must be a spec, and name the model."""
    path = tmp_path / "costs.json"
    data = cost_profile().model_dump(mode="json")
    del data["started_with"]
    path.write_text(json.dumps(data))
    assert load_profile(path).started_with is None
    data["started_with"] = {"model": "org/mine", "prompt": {"num_gpus": 1}}
    path.write_text(json.dumps(data))
    assert load_profile(path).started_with == data["started_with"]
    for wrong, said in (({"prompt": {"num_gpu": 1}, "model": "m"}, r"prompt\.num_gpu"), ({"name": "x"}, "the model")):
        path.write_text(json.dumps(data | {"started_with": wrong}))
        with pytest.raises(ConfigError, match=rf"started_with(.|\n)*{said}"):
            load_profile(path)


def test_predictions_take_what_the_noise_hides_at_its_middle_and_plans_at_its_bound() -> None:
    profile = cost_profile(
        decode_per_cached_token_s=refused(4e-7), prefill_sending_ratio=refused(1.1, "bounded"), decode_base_s=0.02
    )
    plan, prediction = profile.model(), profile.expected()
    assert (plan.decode.per_cached_token_s, prediction.decode.per_cached_token_s) == (4e-7, 2e-7)
    assert (plan.prefill_sending, prediction.prefill_sending) == (1.1, pytest.approx(1.05))
    assert plan.decode.base_s == prediction.decode.base_s == 0.02
