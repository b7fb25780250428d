"""Probes among requests under seeded faults: each ends in time, once, and never costs a request its answer."""

import pytest
from simulated_cluster import Cluster
from simulated_network import Faults
from twinpool.router.probes import PassesQuestion, ProbeRefusal

SEEDS = range(20)
LOSSY = Faults(loss=0.15, duplication=0.15, num_crashes=2, num_router_crashes=1)


@pytest.fixture(scope="module")
def clusters() -> list[Cluster]:
    """All seeds, each run to its end: invariants, deadlines, blocks and answers are checked on the way."""
    clusters = [Cluster(seed, LOSSY if seed % 4 == 0 else None, num_requests=8, num_probes=16) for seed in SEEDS]
    for seed, cluster in zip(SEEDS, clusters, strict=True):
        try:
            cluster.run()
        except Exception as error:
            error.add_note(f"it was seed {seed}")
            raise
    return clusters


def test_probes_end_in_every_way_that_faults_leave_them(clusters: list[Cluster]) -> None:
    """Times, busy workers, deaths in mid-probe, lost messages and exceeded limits all occur, and nothing hangs."""
    results = [probe.result for cluster in clusters for probe in cluster.probes.values()]
    reasons = " | ".join(result.reason for result in results if isinstance(result, ProbeRefusal))
    assert sum(isinstance(result, tuple) for result in results) >= 50
    for reason in ("no answer within", "died meanwhile", "serves requests", "another probe", "ended within the"):
        assert reason in reasons, reason


def test_without_faults_and_requests_every_probe_that_has_its_workers_gets_its_times() -> None:
    cluster = Cluster(3, Faults(), num_requests=0, num_probes=40)
    cluster.run()
    results = [(p.question, p.result) for p in cluster.probes.values() if not p.is_gone]
    for question, result in results:
        if isinstance(result, ProbeRefusal):
            assert result.is_retryable or "ended within the" in result.reason, result
        else:
            assert result is not None
            assert len(result) == (question.num_repeats if isinstance(question, PassesQuestion) else 1)
    assert sum(isinstance(result, tuple) for _, result in results) >= 20
