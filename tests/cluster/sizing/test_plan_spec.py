"""The spec that a plan writes: `twinpool up` starts it without another flag, as the calibrated cluster was started."""

from pathlib import Path

import pytest
import yaml
from cost_profiles import CAPACITY, cost_profile
from twinpool.cluster.config import DEFAULT_MODEL, DEFAULT_MODEL_FOLDER, load_spec, parse_spec
from twinpool.cluster.cost_profile import CostProfile
from twinpool.cluster.sizing.distributions import ConstantLengths, LognormalLengths, Workload, generate
from twinpool.cluster.sizing.plan import Effort, Plan, plan
from twinpool.cluster.sizing.plan_spec import cluster_yaml, is_model_of, startable_model, started_with
from twinpool.cluster.sizing.summary import Slo
from twinpool.cluster.sizing.trials import Limits
from twinpool.cluster.sizing.workload import Request

PROFILE = cost_profile(prefill_per_token_s=1e-4, decode_per_sequence_s=1e-3)
SLO = Slo(ttft_s=0.4, tpot_s=0.025)
QUICK = Effort(num_draws=0)
PAIRS = Limits(policies=("disaggregated",))


def workload() -> list[Request]:
    lengths = LognormalLengths(800, 0.6), ConstantLengths(60)
    return generate(Workload(12.0, *lengths, num_requests=40, seed=3))


@pytest.fixture(scope="module")
def usual() -> Plan:
    return plan(workload(), PROFILE, SLO, Limits(max_workers=6), effort=QUICK)


def test_the_spec_loads_with_the_sizes_and_the_limits_of_the_costs(usual: Plan, tmp_path: Path) -> None:
    text = cluster_yaml(usual, PROFILE)
    assert text is not None
    assert usual.startable is not None
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    spec = load_spec(path)
    assert spec.prompt.num_workers == usual.startable.candidate.num_prompt
    assert spec.completion.num_workers == usual.startable.candidate.num_completion
    engine = spec.completion.engine
    assert (engine.num_blocks, engine.block_size) == (CAPACITY.num_blocks, CAPACITY.block_size_tokens)
    assert engine.max_num_batched_tokens == CAPACITY.max_num_batched_tokens
    assert engine.dtype == "bfloat16"


def test_a_spec_that_cannot_hold_the_recommendation_says_so() -> None:
    found = plan(workload(), PROFILE, SLO, Limits(normal_cost=0.1), effort=QUICK)
    assert found.recommended is not None
    assert found.recommended.candidate.num_normal
    text = cluster_yaml(found, PROFILE)
    assert text is not None
    assert "cannot be started yet" in text
    only_normal = plan(workload(), PROFILE, SLO, Limits(policies=("chunked",)), effort=QUICK)
    assert cluster_yaml(only_normal, PROFILE) is None


def test_a_spec_starts_the_model_as_up_takes_it() -> None:
    """Workers name the default model by its folder, which `up` would look for on the hub."""
    found = plan(workload(), PROFILE, SLO, PAIRS, effort=QUICK)
    by_folder = cost_profile(model=DEFAULT_MODEL_FOLDER)
    assert yaml.safe_load(cluster_yaml(found, by_folder) or "")["model"] == DEFAULT_MODEL
    assert yaml.safe_load(cluster_yaml(found, by_folder, "/models/mine") or "")["model"] == "/models/mine"
    unknown = cost_profile(model="mine")  # a folder somewhere
    assert (startable_model(unknown), cluster_yaml(found, unknown)) == (None, None)
    assert startable_model(cost_profile(model="org/mine")) == "org/mine"
    recorded = unknown.model_copy(update={"started_with": {"model": "/models/mine"}})
    assert yaml.safe_load(cluster_yaml(found, recorded) or "")["model"] == "/models/mine"


@pytest.mark.parametrize(
    ("model", "is_it"), [(DEFAULT_MODEL, True), (DEFAULT_MODEL_FOLDER, True), ("org/other", False), ("/m/other", False)]
)
def test_a_model_is_known_by_the_name_that_up_takes_and_by_its_own(model: str, is_it: bool) -> None:
    assert is_model_of(cost_profile(model=DEFAULT_MODEL_FOLDER), model) == is_it


def test_a_spec_starts_the_pools_as_the_calibrated_cluster_was_started() -> None:
    """GPUs, engine limits and transfers come back; sizes are the plan's, and an environment is not recorded."""
    pools = {
        "prompt": {"num_workers": 3, "num_gpus": 1, "env": {"TOKEN": "secret"}, "engine": {"num_threads": 4}},
        "completion": {"label_selector": {"gpu": "big"}, "engine": {"max_num_seqs": CAPACITY.max_num_seqs}},
    }
    spec = parse_spec({"model": "org/mine", "transfer": {"credit_bytes": 1 << 20}, **pools}, "the test")
    profile = PROFILE.model_copy(update={"started_with": started_with(spec)})
    again = CostProfile.model_validate_json(profile.model_dump_json())
    found = plan(workload(), again, SLO, PAIRS, effort=QUICK)
    text = cluster_yaml(found, again)
    assert text is not None
    assert "secret" not in text
    planned = parse_spec(yaml.safe_load(text), "the plan")
    assert found.startable is not None
    assert planned.prompt.num_workers == found.startable.candidate.num_prompt
    assert (planned.model, planned.transfer) == (spec.model, spec.transfer)
    assert (planned.prompt.num_gpus, planned.prompt.engine.num_threads) == (1, 4)
    assert (planned.completion.num_gpus, planned.completion.engine.num_threads) == (0, 1)
    assert planned.completion.label_selector == {"gpu": "big"}
    assert planned.completion.engine.num_blocks == CAPACITY.num_blocks
