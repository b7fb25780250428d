"""Who is alive, by hellos, heartbeats and a clock."""

from typing import Any

import pytest
from twinpool.cluster.config import LivenessSpec
from twinpool.cluster.membership import Gone, Joined, Membership
from twinpool.cluster.protocol.identity import WorkerId
from twinpool.cluster.protocol.messages import Heartbeat, Hello, KVLayoutInfo, Load, ModelIdentity

LIVENESS = LivenessSpec(heartbeat_s=0.5, suspect_after_s=2.0, gone_after_s=3.0, stalled_after_s=20.0)
A, B = WorkerId("prompt-0", "a1"), WorkerId("completion-0", "b1")
LAYOUT = KVLayoutInfo(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16")
IDENTITY = ModelIdentity(model="smollm2", fingerprint="f00d", dtype="bfloat16", layout=LAYOUT)


def hello(identity: ModelIdentity = IDENTITY, **changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "role": "PROMPT",
        "pid": 1,
        "host": "h",
        "identity": identity,
        "block_size": 16,
        "num_blocks": 9,
        "max_model_len": 99,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
    }
    return Hello(**(fields | changes))


def beat(progress: int = 0, is_busy: bool = False, num_free_blocks: int = 0, longest_stretch_s: float = 0) -> Heartbeat:
    load = Load(num_blocks=9, num_free_blocks=num_free_blocks)
    return Heartbeat(progress=progress, is_busy=is_busy, longest_stretch_s=longest_stretch_s, load=load)


def joined(*workers: WorkerId) -> Membership:
    membership = Membership(LIVENESS)
    for worker in workers:
        membership.join(worker, hello(), 0.0)
    return membership


def run(membership: Membership, until_s: float, since_s: float = 0.0) -> list[tuple[float, Gone]]:
    """Tick every tenth of a second; return who went when."""
    gone: list[tuple[float, Gone]] = []
    for tenth in range(round(since_s * 10), round(until_s * 10) + 1):
        gone += [(tenth / 10, each) for each in membership.tick(tenth / 10)]
    return gone


def state(membership: Membership, worker: WorkerId = A) -> str:
    member = membership.get(worker)
    assert member is not None
    return member.state


def test_silence_makes_suspect_then_gone() -> None:
    membership = joined(A)
    assert run(membership, 1.9) == []
    assert state(membership) == "alive"
    assert run(membership, 2.9, 2.0) == []
    assert state(membership) == "suspect"
    assert run(membership, 3.5, 3.0) == [(3.0, Gone(A, "no heartbeat for 3.0 s"))]
    assert membership.members == []
    assert not membership.heartbeat(A, beat(), 3.6), "it has to say hello again"


def test_a_heartbeat_ends_the_suspicion() -> None:
    membership = joined(A, B)
    run(membership, 2.5)
    assert membership.heartbeat(A, beat(num_free_blocks=7), 2.5)
    assert (state(membership, A), state(membership, B)) == ("alive", "suspect")
    member = membership.get(A)
    assert member is not None
    assert member.load == Load(num_blocks=9, num_free_blocks=7)
    assert [gone.worker for _, gone in run(membership, 5.4, 2.6)] == [B]
    assert [at_s for at_s, _ in run(membership, 6.0, 5.5)] == [5.5]


def keep_beating(membership: Membership, until_s: int, **how: Any) -> list[tuple[float, Gone]]:
    gone: list[tuple[float, Gone]] = []
    for half in range(2 * until_s):
        membership.heartbeat(A, beat(**how), half / 2)
        gone += run(membership, half / 2 + 0.4, half / 2)
    return gone


@pytest.mark.parametrize("is_busy", [True, False])
def test_without_progress_a_member_is_gone_although_it_beats(is_busy: bool) -> None:
    """Its heartbeats come from a thread of their own and prove nothing about the engine loop, which turns when idle."""
    gone = keep_beating(joined(A), 30, progress=5, is_busy=is_busy)
    assert gone == [(20.0, Gone(A, "heartbeats without progress for 20.0 s"))]


def test_who_computes_long_at_a_stretch_may_do_so() -> None:
    """A large model's layers take their time: three times what it has shown that it needs."""
    gone = keep_beating(joined(A), 60, progress=5, longest_stretch_s=9.0)
    assert gone == [(27.0, Gone(A, "heartbeats without progress for 27.0 s"))]


def test_a_silent_member_is_called_silent() -> None:
    """What it said last of its progress is as old as its last heartbeat, and says nothing more."""
    membership = Membership(LIVENESS.model_copy(update={"stalled_after_s": 2.5}))
    membership.join(A, hello(), 0.0)
    assert run(membership, 4.0) == [(3.0, Gone(A, "no heartbeat for 3.0 s"))]


def test_when_everybody_is_silent_they_get_as_long_as_their_leases() -> None:
    """It is more likely we who are cut off; whoever holds on to our requests still does."""
    membership = joined(A, B)
    assert {at_s for at_s, _ in run(membership, 6.0)} == {5.0}
    assert membership.members == []


def test_when_one_of_the_silent_speaks_the_others_are_gone() -> None:
    membership = joined(A, B)
    assert run(membership, 3.9) == []
    membership.heartbeat(B, beat(1), 4.0)
    assert [(at_s, gone.worker) for at_s, gone in run(membership, 4.5, 4.0)] == [(4.0, A)]


def test_who_is_silent_since_a_connection_closed_is_gone_as_soon_as_suspect() -> None:
    """A dead process closes its connection; the others are heard again, so they are not meant."""
    membership = joined(A, B)
    run(membership, 0.2)
    membership.connection_lost(0.3)
    gone: list[tuple[float, Gone]] = []
    for half in range(1, 9):
        membership.heartbeat(B, beat(progress=half), half / 2)
        gone += run(membership, half / 2 + 0.4, half / 2)
    assert gone == [(2.0, Gone(A, "no heartbeat for 2.0 s"))]


def test_a_connection_that_closed_before_the_last_heartbeat_shortens_nothing() -> None:
    membership = joined(A, B)
    membership.connection_lost(0.3)
    for worker in (A, B):
        membership.heartbeat(worker, beat(1), 0.5)
    run(membership, 1.0)
    membership.heartbeat(B, beat(2), 1.0)
    run(membership, 2.9, 1.1)
    membership.heartbeat(B, beat(3), 2.9)
    assert [at_s for at_s, _ in run(membership, 4.0, 3.0)] == [3.5]


def test_when_everybodys_connection_closed_they_still_get_as_long_as_their_leases() -> None:
    membership = joined(A, B)
    membership.connection_lost(0.3)
    assert {at_s for at_s, _ in run(membership, 6.0)} == {5.0}


def test_any_progress_is_enough() -> None:
    membership = joined(A)
    for half in range(120):
        membership.heartbeat(A, beat(progress=half // 30, is_busy=True), half / 2)
        assert run(membership, half / 2 + 0.4, half / 2) == []


def test_our_own_stall_is_forgiven() -> None:
    """After a pause of this process nobody is dead: it may be we who did not listen."""
    membership = joined(A, B)
    run(membership, 1.5)
    assert membership.tick(30.0) == []
    assert (state(membership, A), state(membership, B)) == ("alive", "alive")
    assert [gone.worker for _, gone in run(membership, 31.4, 30.1)] == []
    assert {gone.worker for _, gone in run(membership, 34.0, 31.5)} == {A, B}, "what was silent before still counts"


def test_a_short_delay_of_our_own_is_not_forgiven() -> None:
    membership = joined(A)
    for at_s in (0.0, 1.0, 2.0):
        membership.tick(at_s)
    assert membership.tick(3.0) == [Gone(A, "no heartbeat for 3.0 s")]


def test_forgiveness_never_reaches_into_the_future() -> None:
    """Someone who joined during the stall is not credited with all of it."""
    membership = Membership(LIVENESS)
    membership.tick(0.0)
    membership.join(A, hello(), 99.0)
    membership.tick(100.0)
    assert [at_s for at_s, _ in run(membership, 104.0, 100.1)] == [103.0]


def test_saying_hello_twice_changes_nothing() -> None:
    membership = joined(A)
    assert membership.join(A, hello(), 1.0) == []
    assert len(membership.members) == 1


def test_a_restarted_worker_replaces_its_old_incarnation() -> None:
    membership = joined(A, B)
    again = WorkerId("prompt-0", "a2")
    changes = membership.join(again, hello(), 1.0)
    member = membership.get(again)
    assert member is not None
    assert changes == [Gone(A, "replaced by a new process"), Joined(member)]
    assert {each.worker for each in membership.members} == {again, B}
    assert not membership.heartbeat(A, beat(), 1.1), "the old one is unknown now"


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"model": "other"}, ["model 'other'", "'smollm2'"]),
        ({"fingerprint": "beef"}, ["fingerprint 'beef'", "'f00d'"]),
        ({"dtype": "float32"}, ["dtype 'float32'", "'bfloat16'"]),
        ({"layout": LAYOUT.model_copy(update={"head_dim": 32})}, ["layout", "'head_dim': 32", "'head_dim': 64"]),
        ({"layout": LAYOUT.model_copy(update={"num_layers": 29})}, ["layout", "'num_layers': 29", "'num_layers': "]),
        ({"layout": LAYOUT.model_copy(update={"num_kv_heads": 5})}, ["layout", "'num_kv_heads': 5"]),
        ({"layout": LAYOUT.model_copy(update={"dtype": "float16"})}, ["layout", "'dtype': 'float16'"]),
    ],
)
def test_a_worker_that_does_not_fit_is_told_both_values(changes: dict[str, Any], names: list[str]) -> None:
    reason = joined(A).mismatch(hello(IDENTITY.model_copy(update=changes)))
    assert reason is not None
    assert all(name in reason for name in names)
    assert reason.count("where the cluster has") == 1, "what agrees is not listed"


def test_workers_that_would_send_by_other_means_are_not_mixed() -> None:
    reason = joined(A).mismatch(hello().model_copy(update={"transport": "gloo"}))
    assert reason == "transfer.transport 'gloo' where the cluster has 'auto'"


def test_several_differences_are_all_named() -> None:
    reason = joined(A).mismatch(hello(IDENTITY.model_copy(update={"model": "x", "dtype": "float16"})))
    assert reason == "model 'x' where the cluster has 'smollm2'; dtype 'float16' where the cluster has 'bfloat16'"


def test_the_first_worker_sets_what_fits() -> None:
    membership = Membership(LIVENESS)
    assert membership.mismatch(hello(IDENTITY.model_copy(update={"model": "x"}))) is None
    assert joined(A).mismatch(hello(role="COMPLETION", block_size=32)) is None, "block sizes may differ"
