"""Many streams, clients that leave at random: no error, no hang, and afterwards everything is as before."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_cluster import LiveCluster, open_things
from twinpool.engine.fake import expected_tokens

VOCAB_SIZE = 260
NUM_STREAMS = 64


class Clients:
    """64 clients that keep asking until the time is up; about a third hang up in the middle."""

    def __init__(self, cluster: LiveCluster, duration_s: float, has_oracle: bool) -> None:
        self.cluster = cluster
        self.has_oracle = has_oracle  # the fake engine's only right answer is known
        self.end_s = time.monotonic() + duration_s
        self.lock = threading.Lock()
        self.num_finished = self.num_left = 0
        self.errors: list[str] = []

    def run(self) -> None:
        threads = [threading.Thread(target=self._client, args=(i,)) for i in range(NUM_STREAMS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, self.end_s - time.monotonic()) + 60)
            assert not thread.is_alive(), "a client hangs"

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < self.end_s:
            try:
                self._ask(rng)
            except Exception as error:
                with self.lock:
                    self.errors.append(repr(error))
                return

    def _ask(self, rng: random.Random) -> None:
        prompt = [rng.randrange(4, 260) for _ in range(rng.choice([1, 7, 40, 120]))]
        num_tokens = rng.choice([1, 5, 40, 80])
        leaves_after = rng.randrange(num_tokens) if rng.random() < 0.35 else None
        fields = {"max_tokens": num_tokens, "ignore_eos": True, "seed": 1, "return_token_ids": True}
        tokens: list[int] = []
        stream = self.cluster.stream(prompt, **fields)
        for chunk in stream:
            assert "error" not in chunk, chunk
            tokens += chunk["choices"][0]["token_ids"]
            if leaves_after is not None and len(tokens) > leaves_after:
                stream.close()  # type: ignore[attr-defined]
                with self.lock:
                    self.num_left += 1
                return
        assert len(tokens) == num_tokens
        assert not self.has_oracle or tokens == expected_tokens(prompt, num_tokens, VOCAB_SIZE, seed=1)
        with self.lock:
            self.num_finished += 1


@pytest.fixture
def cluster(tiny_llama: Path) -> Iterator[LiveCluster]:
    fake = {"num_workers": 2, "engine": {"kind": "fake", "num_blocks": 160}}
    with LiveCluster(tiny_llama, {"prompt": fake, "completion": fake}) as cluster:
        yield cluster


def soak(cluster: LiveCluster, duration_s: float, has_oracle: bool = True) -> None:
    warm_up = Clients(cluster, 1.0, has_oracle)
    warm_up.run()
    cluster.wait_idle()
    before = open_things(cluster)
    clients = Clients(cluster, duration_s, has_oracle)
    clients.run()
    assert clients.errors == []
    assert clients.num_finished > 50
    assert clients.num_left > 10
    cluster.wait_idle(30)
    cluster.client.get("/health/live")
    after = open_things(cluster)
    for name, (threads, descriptors, children) in after.items():
        assert threads <= before[name][0], f"{name}: threads {before[name]} → {after[name]}"
        assert descriptors <= before[name][1] + 2, f"{name}: descriptors {before[name]} → {after[name]}"
        assert children == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_64_streams_for_two_minutes(cluster: LiveCluster) -> None:
    """64 streams, two minutes, clients that leave: no error, no hang, no block, thread or descriptor left."""
    soak(cluster, 120.0)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_64_streams_of_a_real_model_for_two_minutes(tiny_llama: Path) -> None:
    """The same with a real model's engine, and blocks for fewer than half of the streams."""
    engine = {"dtype": "float32", "block_size": 16, "num_blocks": 160}
    pools = {pool: {"num_workers": 2, "engine": engine} for pool in ("prompt", "completion")}
    with LiveCluster(tiny_llama, pools) as cluster:
        soak(cluster, 120.0, has_oracle=False)
