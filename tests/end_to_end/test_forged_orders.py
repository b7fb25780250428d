"""Orders that no router of ours would give, sent past it to real workers: refused in words, and the worker goes on.

What the HTTP side checks is checked again where it would do harm: a limit that only one door has is no limit.
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import zmq
from live_cluster import LiveCluster, wait_until
from twinpool.cluster.protocol.codec import FROM_WORKER, decode, encode
from twinpool.cluster.protocol.identity import PROTOCOL_VERSION
from twinpool.cluster.protocol.messages import (
    Failed,
    FirstToken,
    Granted,
    GrantRequest,
    Heartbeat,
    Hello,
    Message,
    Prefill,
    SamplingParams,
    Welcome,
)
from twinpool.engine.fake import expected_tokens

VOCAB_SIZE, NUM_BLOCKS, BLOCK_SIZE, MAX_MODEL_LEN = 260, 32, 16, 400
ENGINE = {"num_blocks": NUM_BLOCKS, "block_size": BLOCK_SIZE, "max_model_len": MAX_MODEL_LEN}
NAN, INFINITY = float("nan"), float("inf")
PROMPT = [10, 20, 30]

# What is no message of ours at all: dropped when it is decoded, and logged.
SAMPLINGS: list[dict[str, Any]] = [
    {"max_tokens": 0},
    {"max_tokens": -1},
    {"max_tokens": "many"},
    {"min_tokens": -1},
    *({"temperature": value} for value in (-0.1, 2.1, 1e9, NAN, INFINITY, "hot")),
    *({"top_p": value} for value in (-1, 1.1, NAN)),
    *({"min_p": value} for value in (-1, 1.1, NAN)),
    {"top_k": -1},
    *({"presence_penalty": value} for value in (-2.1, 2.1, NAN)),
    *({"frequency_penalty": value} for value in (-2.1, 2.1, NAN)),
    *({"repetition_penalty": value} for value in (0, -1, 2.1, NAN)),
    *({"logit_bias": {5: value}} for value in (-101, 101, NAN, INFINITY, "x")),
    {"logit_bias": {-1: 1}},
    {"logit_bias": dict.fromkeys(range(301), 1)},
    {"stop_token_ids": [-1]},
    {"stop_token_ids": list(range(65))},
    {"seed": 2**63},
    {"num_logprobs": 21},
    {"num_logprobs": -1},
    {"num_logprobs": 10**9},
    {"grammar": {"kind": "regex", "source": "a" * 20_000}},
    {"grammar": {"kind": "python", "source": "a"}},
    {"brand_new": 1},
]
NO_MESSAGE: list[dict[str, Any]] = [
    *({"sampling": changes} for changes in SAMPLINGS),
    *({"generation": value} for value in (0, -1)),
    *({"credit_bytes": value} for value in (0, -1)),
    {"num_cached_tokens": len(PROMPT) + 1},
    {"num_cached_tokens": 2**63},
    {"num_cached_tokens": -1},
    {"num_output_tokens": -1},
    {"remaining_ms": -1},
    {"arrival_order": -1},
    {"request_id": ""},
    {"request_id": "r" * 129},
    {"receiver": "r" * 129},
    {"receiver_addresses": ["ipc:///tmp/x"] * 5},
    {"receiver_addresses": ["ipc:///" + "x" * 256]},
    {"token_ids": [5, -1]},
    {"token_ids": [-(2**31)]},
]
# What is a message, and cannot be done here: answered with Failed.
IMPOSSIBLE: list[dict[str, Any]] = [
    {"token_ids": []},
    {"token_ids": [5] * (MAX_MODEL_LEN + 1)},
    {"token_ids": [5] * 1_000_000},
    {"token_ids": [5, VOCAB_SIZE]},
    {"token_ids": [2**31 - 1]},
    {"sampling": {"logit_bias": {VOCAB_SIZE: 1.0}}},
    {"sampling": {"logit_bias": {2**31 - 1: 1.0}, "temperature": 0.5}},
    {"sampling": {"stop_token_ids": [2**31 - 1], "min_tokens": 5}},
    {"num_output_tokens": len(PROMPT)},
    {"num_output_tokens": 10**9},
]
# Large numbers that mean nothing bad: taken as they are.
HARMLESS: list[dict[str, Any]] = [
    {"sampling": {"max_tokens": 10**9}},
    {"sampling": {"min_tokens": 10**9, "max_tokens": 2**63}},
    {"sampling": {"top_k": 10**9}},
    {"sampling": {"seed": -(2**63)}},
    {"attempt": 2**63},
    {"attempt": -1},
    {"remaining_ms": 2**63},
    {"arrival_order": 2**63},
    {"generation": 2**63},
    {"credit_bytes": 2**63},
    {"receiver_addresses": ["nonsense"]},
    {"receiver_addresses": []},
    {"receiver": "/"},
]


class RogueRouter:
    """A control socket of our own, for workers that were started without a router."""

    def __init__(self, cluster: LiveCluster) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(f"ipc://{cluster.folder}/control.sock")
        self.workers: dict[str, bytes] = {}

    def close(self) -> None:
        self._socket.close()
        self._context.term()

    def welcome(self, names: list[str]) -> None:
        while set(self.workers) != set(names):
            identity, _ = self.receive(Hello, within_s=100)
            self.workers[identity.decode().partition("/")[0]] = identity
            self.send(identity, encode(Welcome(router_incarnation="rogue")))

    def send(self, identity: bytes, frames: list[bytes]) -> None:
        self._socket.send_multipart([identity, *frames])

    def receive(self, *kinds: type[Message], within_s: float = 30.0) -> tuple[bytes, Message]:
        deadline_s = time.monotonic() + within_s
        while time.monotonic() < deadline_s:
            if self._socket.poll(100):
                identity, *frames = self._socket.recv_multipart()
                message = decode(frames, FROM_WORKER)
                if isinstance(message, kinds):
                    return identity, message
        raise AssertionError(f"no {[kind.__name__ for kind in kinds]} within {within_s:g} s")


@pytest.fixture(scope="module", params=["fake", pytest.param("model", marks=pytest.mark.slow)])
def alone(request: pytest.FixtureRequest, tiny_llama: Path) -> Iterator[tuple[LiveCluster, RogueRouter]]:
    """A worker of each kind, and nobody between them and us."""
    pool = {"engine": {"kind": request.param, **ENGINE}}
    cluster = LiveCluster(
        tiny_llama, {"prompt": pool, "completion": pool, "liveness": {"lease_s": 0.5, "renew_s": 0.2}}
    )
    rogue = RogueRouter(cluster)
    try:
        for name in ("prompt-0", "completion-0"):
            cluster.start(name)
        rogue.welcome(["prompt-0", "completion-0"])
        yield cluster, rogue
    except BaseException:
        sys.stderr.write(cluster.logs())
        raise
    finally:
        rogue.close()
        codes = cluster.close()
    assert set(codes.values()) == {0}


def forged(kind: type[GrantRequest] | type[Prefill], request_id: str, changes: dict[str, Any]) -> list[bytes]:
    """Return the frames of an order with `changes`, which nothing on this side has checked."""
    own: dict[str, Any] = {"arrival_order": 1}
    if kind is Prefill:
        own = {"generation": 1, "credit_bytes": 1 << 20, "receiver": "completion-9/x", "receiver_addresses": []}
    known = {name: value for name, value in changes.items() if name in kind.model_fields}
    sampling = SamplingParams(max_tokens=4, seed=1).model_dump() | known.pop("sampling", {})
    token_ids = known.pop("token_ids", PROMPT)
    fields = {"request_id": request_id, "attempt": 1, **own, "sampling": sampling, **known}
    body: bytes = msgpack.packb([PROTOCOL_VERSION, kind.__name__, fields])
    return [body, np.asarray(token_ids, dtype="<i4").tobytes()]


def orders_of(kind: type[Message], all_changes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those that are about fields of this message."""
    return [changes for changes in all_changes if set(changes) <= set(kind.model_fields)]


class Target:
    """One worker, the order that is forged for it, and the answer to a right one."""

    def __init__(self, alone: tuple[LiveCluster, RogueRouter], name: str) -> None:
        self.cluster, self.rogue = alone
        self.name = name
        self.kind: type[GrantRequest] | type[Prefill] = Prefill if name == "prompt-0" else GrantRequest
        self.right_answer = FirstToken if self.kind is Prefill else Granted

    def ask(self, request_id: str, changes: dict[str, Any]) -> Message:
        """Send an order and return the first answer to it."""
        self.rogue.send(self.rogue.workers[self.name], forged(self.kind, request_id, changes))
        while True:
            _, answer = self.rogue.receive(self.right_answer, Failed)
            if getattr(answer, "request_id", None) == request_id:
                return answer

    def num_ignored(self) -> int:
        return (self.cluster.folder / f"{self.name}.log").read_text().count("ignored a message of the router")

    def is_empty(self) -> bool:
        identity, beat = self.rogue.receive(Heartbeat)
        assert isinstance(beat, Heartbeat)
        load = beat.load
        is_its_own = identity.decode().startswith(self.name)
        return is_its_own and load.num_free_blocks == load.num_blocks and load.num_transfers == 0


@pytest.fixture(params=["prompt-0", "completion-0"])
def target(request: pytest.FixtureRequest, alone: tuple[LiveCluster, RogueRouter]) -> Iterator[Target]:
    """Afterwards the worker is the same process, does right what is right, and has every block."""
    target = Target(alone, request.param)
    yield target
    answer = target.ask("good-" + request.node.name, {})
    assert isinstance(answer, target.right_answer)
    if isinstance(answer, FirstToken) and target.cluster.spec.prompt.engine.kind == "fake":
        assert answer.token.token == expected_tokens(PROMPT, 1, VOCAB_SIZE, seed=1)[0]
    wait_until(target.is_empty, 20, "every block at home, once the leases have run out")
    assert target.cluster.processes[target.name].poll() is None


def test_what_is_no_message_is_dropped(target: Target) -> None:
    """Each is noted in the worker's log; none is answered, since nobody can tell what it was about."""
    orders = orders_of(target.kind, NO_MESSAGE)
    assert len(orders) > 40
    for changes in orders:
        before = target.num_ignored()
        target.rogue.send(target.rogue.workers[target.name], forged(target.kind, "forged", changes))
        wait_until(lambda n=before: target.num_ignored() == n + 1, 10, f"{changes} dropped")


def test_what_cannot_be_done_is_refused_for_good(target: Target) -> None:
    """By words that say what is allowed, and not to be tried elsewhere."""
    for number, changes in enumerate(orders_of(target.kind, IMPOSSIBLE)):
        answer = target.ask(f"impossible-{number}", changes)
        assert isinstance(answer, Failed), changes
        assert not answer.is_retryable, changes
        assert answer.reason


def test_large_numbers_are_only_numbers(target: Target) -> None:
    for number, changes in enumerate(orders_of(target.kind, HARMLESS)):
        answer = target.ask(f"large-{number}", changes)
        assert isinstance(answer, target.right_answer), (changes, answer)
