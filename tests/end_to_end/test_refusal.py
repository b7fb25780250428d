"""I7: a worker that does not fit the cluster is refused at hello, by a message that names both values."""

from pathlib import Path
from typing import Any

import msgpack
import zmq
from live_cluster import LiveCluster, wait_until
from twinpool.cluster.protocol.codec import FROM_ROUTER, decode, encode
from twinpool.cluster.protocol.messages import Hello, KVLayoutInfo, Message, ModelIdentity, Refused, Welcome


def test_a_worker_of_another_dtype_is_refused_and_says_why(tiny_llama: Path) -> None:
    """The refused worker ends with exit code 3; the incident and its log name what it has and what the cluster has."""
    engine = {"num_blocks": 16, "block_size": 16}
    spec = {
        "prompt": {"engine": {**engine, "dtype": "float32"}},
        "completion": {"engine": {**engine, "dtype": "bfloat16"}},
    }
    cluster = LiveCluster(tiny_llama, spec)
    try:
        cluster.start("router")
        cluster.start("prompt-0")
        wait_until(cluster.is_listening, 100, "the router")
        wait_until(lambda: cluster.worker("prompt-0"), 100, "the PROMPT worker")
        cluster.start("completion-0")
        assert cluster.processes["completion-0"].wait(100) == 3
        incident = next(i["what"] for i in cluster.status()["incidents"] if i["worker"] == "completion-0")
        log = cluster.logs()
        assert cluster.client.get("/health/ready").status_code == 503
    finally:
        cluster.close()
    for text in (incident, log):
        assert "dtype 'bfloat16' where the cluster has 'float32'" in text


MEMBER = Hello(
    role="COMPLETION",
    pid=1,
    host="h",
    identity=ModelIdentity(
        model="m",
        fingerprint="weights-1",
        dtype="float32",
        layout=KVLayoutInfo(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32"),
    ),
    block_size=16,
    num_blocks=64,
    max_model_len=512,
    max_num_batched_tokens=64,
    max_num_seqs=4,
)
Changes = dict[str, Any]
SKEWS: list[tuple[Changes, Changes, list[str]]] = [  # of the identity, of the layout, and what the refusal says
    ({"dtype": "bfloat16"}, {}, ["dtype 'bfloat16' where the cluster has 'float32'"]),
    ({"fingerprint": "weights-2"}, {}, ["fingerprint 'weights-2' where the cluster has 'weights-1'"]),
    ({"model": "another"}, {}, ["model 'another' where the cluster has 'm'"]),
    ({}, {"num_layers": 4}, ["layout", "'num_layers': 4", "'num_layers': 3"]),
    ({}, {"num_kv_heads": 1}, ["layout", "'num_kv_heads': 1", "'num_kv_heads': 2"]),
    ({}, {"head_dim": 16}, ["layout", "'head_dim': 16", "'head_dim': 8"]),
    ({}, {"dtype": "float16"}, ["layout", "'dtype': 'float16'", "'dtype': 'float32'"]),
]


def say_hello(cluster: LiveCluster, name: str, frames: list[bytes]) -> Message:
    """Connect to a router as a worker would, and return its answer."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IDENTITY, f"{name}/x".encode())
        socket.connect(f"ipc://{cluster.folder}/control.sock")
        socket.send_multipart(frames)
        assert socket.poll(20_000), "the router did not answer"
        return decode(socket.recv_multipart(), FROM_ROUTER)


def test_workers_of_another_kind_are_refused_by_a_router_and_another_block_size_is_not(tiny_llama: Path) -> None:
    """What must be equal is named with both values; what each side may choose for itself is welcome."""
    cluster = LiveCluster(tiny_llama, {})
    try:
        cluster.start("router")
        wait_until(cluster.is_listening, 60, "the router")
        assert isinstance(say_hello(cluster, "completion-0", encode(MEMBER)), Welcome)
        for of_identity, of_layout, said in SKEWS:
            layout = MEMBER.identity.layout.model_copy(update=of_layout)
            identity = MEMBER.identity.model_copy(update={**of_identity, "layout": layout})
            answer = say_hello(cluster, "prompt-0", encode(MEMBER.model_copy(update={"identity": identity})))
            assert isinstance(answer, Refused), said
            assert [words for words in said if words not in answer.reason] == [], answer.reason
        version, kind, fields = msgpack.unpackb(encode(MEMBER)[0])
        for other in (version - 1, version + 1):
            answer = say_hello(cluster, "prompt-0", [msgpack.packb([other, kind, fields]) or b""])
            assert isinstance(answer, Refused)
            assert f"version {other}, this process speaks {version}" in answer.reason
        free = {"block_size": 32, "num_blocks": 7, "max_num_seqs": 9, "max_num_batched_tokens": 128, "role": "PROMPT"}
        assert isinstance(say_hello(cluster, "prompt-0", encode(MEMBER.model_copy(update=free))), Welcome)
        assert {worker["name"]: worker["block_size"] for worker in cluster.status()["workers"]} == {
            "completion-0": 16,
            "prompt-0": 32,
        }
    finally:
        cluster.close()
