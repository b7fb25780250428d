"""Two routers over one set of workers, as real processes: each serves, and the fate of one leaves the other alone."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_cluster import LiveCluster, is_idle, wait_until
from twinpool.engine.fake import expected_tokens

VOCAB_SIZE = 260  # of the tiny models' tokenizer
FAKE = {"num_workers": 2, "engine": {"kind": "fake", "num_blocks": 64}}
LEASE_S = 2.0
SPEC = {"prompt": FAKE, "completion": FAKE, "liveness": {"lease_s": LEASE_S}}


@pytest.fixture
def cluster(tiny_llama: Path) -> Iterator[LiveCluster]:
    with LiveCluster(tiny_llama, SPEC, num_routers=2) as cluster:
        yield cluster


def ask(cluster: LiveCluster, number: int, num_tokens: int = 100) -> dict[str, Any]:
    """Send request `number`; return its body. The fake engine makes its only right answer known."""
    prompt = [(number * 7 + i) % 250 + 4 for i in range(5 + number)]
    fields = {"max_tokens": num_tokens, "ignore_eos": True, "seed": number}
    body = cluster.complete(prompt, **fields, return_token_ids=True, timing=True)
    assert body["choices"][0]["token_ids"] == expected_tokens(prompt, num_tokens, VOCAB_SIZE, seed=number)
    return body


def names(cluster: LiveCluster) -> dict[str, tuple[int, str]]:
    """Return each worker's process and incarnation as this router knows them."""
    return {worker["name"]: (worker["pid"], worker["incarnation"]) for worker in cluster.status()["workers"]}


@pytest.mark.slow
def test_both_serve_the_same_workers_at_once(cluster: LiveCluster) -> None:
    """32 requests through each: right answers; each router knows the same processes, by names of its own."""
    first, second = cluster.at(0), cluster.at(1)
    with ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(ask, view, number) for number in range(32) for view in (first, second)]
        wait_until(lambda: all(view.status()["running"] >= 4 for view in (first, second)), 20, "both have requests")
        for future in futures:
            future.result(timeout=60)
    ours, theirs = names(first), names(second)
    assert {name: pid for name, (pid, _) in ours.items()} == {name: pid for name, (pid, _) in theirs.items()}
    assert not {incarnation for _, incarnation in ours.values()} & {incarnation for _, incarnation in theirs.values()}


def test_a_router_s_death_leaves_the_other_one_s_streams_alone(cluster: LiveCluster) -> None:
    """kill -9 in mid-load: no retry at the other router, the blocks come home within the lease, and it serves again."""
    victim, survivor = cluster.at(0), cluster.at(1)
    before = names(survivor)
    with ThreadPoolExecutor(16) as pool:
        lost = [pool.submit(ask, victim, number, 400) for number in range(8)]
        kept = [pool.submit(ask, survivor, number, 300) for number in range(8)]
        wait_until(lambda: min(view.status()["running"] for view in (victim, survivor)) >= 6, 20, "requests that run")
        cluster.kill("router")
        killed_s = time.monotonic()
        assert all(future.exception(timeout=30) is not None for future in lost), "connections to a dead router"
        bodies = [future.result(timeout=60) for future in kept]
    assert [body["timing"]["num_attempts"] for body in bodies] == [1] * len(bodies), "nothing was repeated"
    answered_s = time.monotonic() - killed_s
    wait_until(lambda: is_idle(survivor.status()), LEASE_S + 2.0, "the dead router's blocks, too, are free")
    home_s = time.monotonic() - killed_s
    assert home_s <= max(answered_s, LEASE_S) + 2.0

    cluster.start("router")
    wait_until(victim.is_listening, 60, "the router is back")
    began_s = time.monotonic()
    wait_until(victim.is_ready, 10, "its workers are back")
    ask(victim, 3)
    assert time.monotonic() - began_s < 6.0
    cluster.wait_ready()
    assert names(survivor) == before, "no worker was restarted, or came back under another name"
    assert {name: pid for name, (pid, _) in names(victim).items()} == {name: pid for name, (pid, _) in before.items()}
    incidents = [incident["what"] for incident in survivor.status()["incidents"]]
    assert all(what.startswith("joined") for what in incidents), incidents


def test_a_router_that_stands_still_leaves_the_other_one_s_streams_alone(cluster: LiveCluster) -> None:
    """SIGSTOP for longer than the lease: it renews nothing, so that what it had asked for ends by its lease.

    Regression: a router whose connections had been given up meanwhile never heard of its workers again.
    """
    sleeper, awake = cluster.at(0), cluster.at(1)
    with ThreadPoolExecutor(8) as pool:
        slept = [pool.submit(ask, sleeper, number, 400) for number in range(4)]
        wait_until(lambda: sleeper.status()["running"] >= 3, 20, "requests that run")
        cluster.kill("router", signal.SIGSTOP)
        bodies = [future.result(timeout=60) for future in [pool.submit(ask, awake, n) for n in range(16)]]
        assert [body["timing"]["num_attempts"] for body in bodies] == [1] * len(bodies)
        wait_until(lambda: is_idle(awake.status()), LEASE_S + 10.0, "the blocks of what was not renewed are free")
        cluster.kill("router", signal.SIGCONT)
        for future in slept:
            future.result(timeout=60)  # right all the same: what was lost is computed again
    incidents = [incident["what"] for incident in awake.status()["incidents"]]
    assert all(what.startswith("joined") for what in incidents), incidents


@pytest.mark.slow
def test_a_worker_s_death_costs_neither_router_an_answer(cluster: LiveCluster) -> None:
    with ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(ask, cluster.at(number % 2), number, 150) for number in range(16)]
        wait_until(lambda: min(cluster.at(i).status()["running"] for i in range(2)) >= 4, 20, "requests that run")
        cluster.kill("completion-0")
        for future in futures:
            future.result(timeout=60)
    cluster.start("completion-0")
    cluster.wait_ready()
    assert all(len(cluster.at(i).status()["workers"]) == 4 for i in range(2))
