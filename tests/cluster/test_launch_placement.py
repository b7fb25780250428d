"""Demand that no node can meet is refused by name, never waited for."""

import pytest
from twinpool.cluster.launch.placement import Demand, Node, check_demand, matches
from twinpool.cluster.protocol.errors import LaunchError

CPU_NODE = Node("cpu", {"CPU": 4.0}, {"zone": "a", "ray.io/node-id": "1"})
GPU_NODE = Node("gpu", {"CPU": 8.0, "GPU": 2.0}, {"zone": "b"})


def test_feasible_demand_passes() -> None:
    demands = [Demand("prompt-0", 1, 1), Demand("completion-0", 1, 1), Demand("router", 0, 0, {"zone": "a"})]
    check_demand(demands, [CPU_NODE, GPU_NODE])


def test_a_missing_gpu_is_named() -> None:
    with pytest.raises(LaunchError, match=r"prompt-0 needs 1 GPU, but no node has that many left .*: 0\)"):
        check_demand([Demand("prompt-0", 1, 1)], [CPU_NODE])


def test_gpus_are_counted_over_all_processes() -> None:
    """Each of three processes would fit alone; together they do not."""
    demands = [Demand(f"prompt-{i}", 1, 1) for i in range(3)]
    with pytest.raises(LaunchError, match="prompt-2 needs 1 GPU"):
        check_demand(demands, [CPU_NODE, GPU_NODE])


def test_a_missing_label_is_named_beside_those_there_are() -> None:
    with pytest.raises(LaunchError, match="completion-0 asks for a node labelled zone=c; labels there are: zone=a, zo"):
        check_demand([Demand("completion-0", 1, 0, {"zone": "c"})], [CPU_NODE, GPU_NODE])


def test_a_gpu_elsewhere_does_not_help_a_labelled_process() -> None:
    with pytest.raises(LaunchError, match="no node with its labels has that many left"):
        check_demand([Demand("prompt-0", 1, 1, {"zone": "a"})], [CPU_NODE, GPU_NODE])


def test_resources_that_are_only_apart_are_refused() -> None:
    few_cpus = Node("gpu", {"CPU": 1.0, "GPU": 1.0}, {})
    with pytest.raises(LaunchError, match="4 CPU and 1 GPU are not free together"):
        check_demand([Demand("prompt-0", 4, 1)], [CPU_NODE, few_cpus])


@pytest.mark.parametrize(
    ("wanted", "actual", "expected"),
    [
        ("a", "a", True),
        ("a", None, False),
        ("!a", "b", True),
        ("!a", "a", False),
        ("in(a, b)", "b", True),
        ("in(a,b)", "c", False),
        ("!in(a,b)", "c", True),
    ],
)
def test_selectors_read_as_ray_reads_them(wanted: str, actual: str | None, expected: bool) -> None:
    labels = {} if actual is None else {"zone": actual}
    assert matches({"zone": wanted}, labels) is expected
