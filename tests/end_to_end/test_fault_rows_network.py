"""A data link whose packets are lost, in a network namespace: half-open TCP as the kernel makes it (rows R7 and R9)."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from invariants import Asker, Invariants
from live_cluster import LiveCluster, free_port
from own_network import own_network, port_is_dead, why_not
from reports import report

ENGINE = {"kind": "fake", "num_blocks": 256, "max_num_batched_tokens": 32, "fake_seconds_per_row": 0.005}
POOLS: dict[str, Any] = {pool: {"num_workers": 2, "engine": ENGINE} for pool in ("prompt", "completion")}


class TcpCluster(LiveCluster):
    """KV to completion-0 goes over TCP to a port that is known; all else as usual."""

    def __init__(self, model_folder: Path, spec: dict[str, Any]) -> None:
        super().__init__(model_folder, spec)
        self.data_port = free_port()

    def arguments(self, name: str) -> list[str]:
        tcp = ["--data-port", str(self.data_port), "--advertise", f"tcp://127.0.0.1:{self.data_port}"]
        return [*super().arguments(name), *(tcp if name == "completion-0" else [])]


@pytest.fixture(scope="module")
def network() -> Iterator[None]:
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    with own_network():
        yield


@pytest.fixture(scope="module")
def cluster(network: None, tiny_llama: Path) -> Iterator[TcpCluster]:
    with TcpCluster(tiny_llama, {**POOLS, "transfer": {"min_frame_bytes": 1}}) as cluster:
        yield cluster


@pytest.mark.parametrize(
    ("idle_s", "down_s"),
    [(1.0, 5.0), (0.0, 1.0), (5.0, 5.0), (0.0, 15.0)],
)
@pytest.mark.slow
def test_packets_that_are_lost_for_a_while_cost_no_answer(cluster: TcpCluster, idle_s: float, down_s: float) -> None:
    """R9: a connection dies unseen while it idles, then traffic comes; the link is healed, no process is restarted."""
    with Asker(cluster, num_prompt_tokens=100, num_tokens=60) as asker:
        invariants = Invariants(cluster, asker)
        with port_is_dead(cluster.data_port):
            time.sleep(idle_s)
            futures = asker.begin(range(8))
            time.sleep(down_s)
        answers = [future.result(timeout=60) for future in futures]
        longest_s = max(answer.seconds for answer in answers)
        attempts = [answer.num_attempts for answer in answers]
        report(f"R9: dead for {idle_s:g} + {down_s:g} s: longest {longest_s:.1f} s, attempts {attempts}")
        assert all(answer.is_complete for answer in answers), [answer.ends for answer in answers]
        assert longest_s <= down_s + 10, "the link is healed, and somebody still waits"
        invariants.check(1)
