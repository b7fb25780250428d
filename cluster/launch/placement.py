"""Whether a cluster's demand can be met by the nodes there are. Pure.

Ray waits for ever, and silently, for a label or a GPU that no node has; so `up` and `scale` ask here first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..protocol.errors import LaunchError


@dataclass(frozen=True)
class Node:
    name: str
    resources: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True)
class Demand:
    """What one process asks of a node."""

    name: str
    num_cpus: float
    num_gpus: float
    label_selector: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": self.num_cpus, "GPU": self.num_gpus}


def check_demand(demands: Sequence[Demand], nodes: Sequence[Node]) -> None:
    """Raise LaunchError naming the first process that no node can hold, and what it lacks."""
    free = {index: dict(node.resources) for index, node in enumerate(nodes)}
    largest_first = sorted(demands, key=lambda demand: (-demand.num_gpus, -demand.num_cpus))
    for demand in largest_first:
        labelled = [i for i, node in enumerate(nodes) if matches(demand.label_selector, node.labels)]
        if not labelled:
            raise _no_such_label(demand, nodes)
        for resource, amount in demand.resources.items():
            _check_resource(demand, resource, amount, [free[i].get(resource, 0.0) for i in labelled])
        fitting = [i for i in labelled if all(free[i].get(r, 0.0) >= a for r, a in demand.resources.items())]
        if not fitting:
            raise LaunchError(f"{demand.name} fits on no node: {_wish(demand)} are not free together on any one node")
        for resource, amount in demand.resources.items():
            free[fitting[0]][resource] = free[fitting[0]].get(resource, 0.0) - amount


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node's labels satisfy a selector: `value`, `!value`, `in(a,b)` or `!in(a,b)`, as Ray reads them."""
    return all(_matches_one(wanted, labels.get(key)) for key, wanted in selector.items())


def _matches_one(wanted: str, actual: str | None) -> bool:
    if wanted.startswith("!"):
        return not _matches_one(wanted[1:], actual)
    if wanted.startswith("in(") and wanted.endswith(")"):
        return actual in [value.strip() for value in wanted[3:-1].split(",")]
    return actual == wanted


def _check_resource(demand: Demand, resource: str, amount: float, free: Sequence[float]) -> None:
    if amount <= 0 or any(available >= amount for available in free):
        return
    raise LaunchError(
        f"{demand.name} needs {amount:g} {resource}, but no node{_labelled(demand)} has that many left "
        f"(most free on one node: {max(free, default=0.0):g})",
        hint=f"lower num_{resource.lower()}s or num_workers of its pool, or add a node",
    )


def _no_such_label(demand: Demand, nodes: Sequence[Node]) -> LaunchError:
    wanted = ", ".join(f"{key}={value}" for key, value in demand.label_selector.items())
    there = sorted({f"{k}={v}" for node in nodes for k, v in node.labels.items() if not k.startswith("ray.io/")})
    return LaunchError(
        f"{demand.name} asks for a node labelled {wanted}; labels there are: {', '.join(there) or 'none'}",
        hint="start a node with `ray start --labels …`, or change label_selector of its pool",
    )


def _labelled(demand: Demand) -> str:
    return " with its labels" if demand.label_selector else ""


def _wish(demand: Demand) -> str:
    return " and ".join(f"{amount:g} {resource}" for resource, amount in demand.resources.items() if amount > 0)
