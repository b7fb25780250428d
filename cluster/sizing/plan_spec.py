"""A plan as a cluster spec: the YAML that `twinpool up` starts without another flag."""

from pathlib import Path
from typing import Any, get_args

import yaml

from ..config import DEFAULT_MODEL, DEFAULT_MODEL_FOLDER, ClusterSpec, EngineSpec, parse_spec
from ..cost_profile import CostProfile, WorkerCapacity
from .plan import Plan

DTYPES: tuple[str, ...] = get_args(EngineSpec.model_fields["dtype"].annotation)
RECORDED = {"served_model_name", "prompt", "completion", "transfer"}  # what the costs depend on, or the model's name
UNRECORDED = {"num_workers", "env"}  # of a pool: the plan decides, and an environment may hold secrets


def started_with(spec: ClusterSpec) -> dict[str, Any]:
    """Return what a profile records of the spec of its cluster: the model, and what differs from the defaults."""
    pools = {"prompt": UNRECORDED, "completion": UNRECORDED}
    return {
        "model": spec.model,
        **spec.model_dump(mode="json", exclude_defaults=True, include=RECORDED, exclude=pools),
    }


def startable_model(profile: CostProfile) -> str | None:
    """Return the profile's model as `twinpool up` takes it; None where the profile does not say.

    Its workers name it by its folder, which is neither a path nor a hub id.
    """
    if profile.started_with is not None:
        return profile.started_with["model"]
    name = profile.fingerprint.model
    if name == DEFAULT_MODEL_FOLDER:
        return DEFAULT_MODEL
    return name if name == DEFAULT_MODEL or "/" in name else None


def is_model_of(profile: CostProfile, model: str) -> bool:
    """Say whether `model`, as `twinpool up` takes it or as the workers name it, is what the costs are of."""
    measured = {profile.fingerprint.model, startable_model(profile) or profile.fingerprint.model}
    return model in measured or _name(model) in {_name(known) for known in measured}


def _name(model: str) -> str:
    return Path(model).expanduser().absolute().name


def cluster_yaml(plan: Plan, profile: CostProfile, model: str | None = None) -> str | None:
    """Return a spec of the best pools that can be started today, as the cluster whose costs these are was.

    `model` is what `twinpool up` takes; without it what the profile says. None where no such pools meet the SLO, or
    nobody says how the model is started.
    """
    choice, model = plan.startable, model or startable_model(profile)
    if choice is None or model is None:
        return None
    fingerprint = profile.fingerprint
    data: dict[str, Any] = {
        **(profile.started_with or {}),
        "model": model,
        "prompt": _pool(profile, "prompt", profile.prompt, choice.candidate.num_prompt),
        "completion": _pool(profile, "completion", profile.completion, choice.candidate.num_completion),
    }
    parse_spec(data, "the plan's spec")
    head = [
        f"Planned for {plan.demand.rate_per_s:.6g} requests/s: attains {choice.trial.attainment:.1%}, "
        f"binding: {choice.binding.constraint}.",
        f"Costs of {fingerprint.model} ({fingerprint.dtype}) on {fingerprint.host}, measured {profile.measured_at}.",
        *_caution(plan),
    ]
    return "".join(f"# {' '.join(line.split())}\n" for line in head) + yaml.safe_dump(data, sort_keys=False)


def _caution(plan: Plan) -> list[str]:
    if plan.recommended is None or plan.recommended == plan.startable:
        return []
    return [
        f"The plan recommends {plan.recommended.candidate.label}, which cannot be started yet. "
        "This is the best that can be."
    ]


def _pool(profile: CostProfile, name: str, capacity: WorkerCapacity, num_workers: int) -> dict[str, Any]:
    fingerprint, recorded = profile.fingerprint, (profile.started_with or {}).get(name, {})
    limits = {
        "kind": fingerprint.engine,
        "dtype": fingerprint.dtype if fingerprint.dtype in DTYPES else "auto",
        "block_size": capacity.block_size_tokens,
        "num_blocks": capacity.num_blocks,
        "max_num_seqs": capacity.max_num_seqs,
        "max_num_batched_tokens": capacity.max_num_batched_tokens,
        "num_threads": fingerprint.num_threads if profile.started_with is None else EngineSpec().num_threads,
    }
    decided = {"num_workers": num_workers, "engine": {**limits, **recorded.get("engine", {})}}
    return {"num_workers": num_workers} | recorded | decided
