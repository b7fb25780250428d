"""A PROMPT worker died under way: the COMPLETION worker goes on from what it has, or gives it back."""

from typing import Any

import pytest
from completion_core import KEY, LAYOUT, STAGES, frame, give, new_core, request, said, step
from twinpool.cluster.protocol.messages import (
    Busy,
    Failed,
    Granted,
    Renew,
    SampledToken,
    SamplingParams,
    Tokens,
    Unknown,
)
from twinpool.decode_worker.core import CompletionCore, WriteKV
from twinpool.kvtransfer.frames import Done, KVFrame, extend_digest

HEIR = ("r", 2)


def half_way(**changes: Any) -> CompletionCore:
    """Layer 0 of six tokens has come when the sender dies."""
    core = new_core(**changes)
    core.on_router(request(), 1.0)
    give(core, frame(layer_end=1, num_bytes=LAYOUT.frame_bytes(1, 6)), 1.5)
    return core


def resume(core: CompletionCore, length: int = 6, now: float = 3.0, **changes: Any) -> Any:
    """Ask for the next attempt; return the only answer."""
    commands = core.on_router(request(length=length, attempt=2, resumed_attempt=1, **changes), now)
    core.check()
    (answer,) = said(commands)
    return answer


def rest(generation: int, length: int = 6) -> list[KVFrame | Done]:
    """What the heir's sender has to send, for a prompt of six tokens."""
    part = frame(generation=generation, layer_start=1, num_bytes=LAYOUT.frame_bytes(1, length))
    part = part.model_copy(update={"attempt": 2})
    done = Done(
        request_id="r",
        attempt=2,
        generation=generation,
        num_frames=1,
        digest=extend_digest(0, 11),
        position=0,
        token=SampledToken(token=50),
        stages=STAGES,
    )
    return [part, done]


def test_the_next_attempt_gets_the_blocks_and_is_told_what_is_missing() -> None:
    core = half_way()
    holding = core.pool.holding(KEY)
    assert holding is not None
    blocks, generation = list(holding.blocks), holding.generation
    answer = resume(core)
    assert isinstance(answer, Granted)
    assert (answer.attempt, answer.arrived_tokens) == (2, (6, 0))
    assert answer.generation != generation
    assert core.pool.num_free == 8
    part, done = rest(answer.generation)
    (write, _) = give(core, part)
    assert isinstance(write, WriteKV)
    assert (write.block_table, write.layers) == (blocks, range(1, 2))
    give(core, done)
    (tokens,) = step(core)
    assert isinstance(tokens, Tokens)
    assert tokens.sequences[0].attempt == 2


def test_frames_of_the_dead_sender_write_nothing_any_more() -> None:
    core = half_way()
    resume(core)
    late = frame(sequence=1, layer_start=1, num_bytes=LAYOUT.frame_bytes(1, 6))
    assert not [command for command in give(core, late) if isinstance(command, WriteKV)]


def test_tokens_that_came_since_get_their_blocks() -> None:
    """Six tokens and one to come fill two blocks of four; with three outputs more there have to be three."""
    core = half_way()
    answer = resume(core, length=9, num_output_tokens=3, sampling=SamplingParams(max_tokens=9))
    assert isinstance(answer, Granted)
    assert (answer.arrived_tokens, core.pool.num_free) == ((6, 0), 7)


def test_a_worker_that_is_full_still_goes_on_with_what_it_has() -> None:
    core = half_way(num_blocks=2, max_num_seqs=1)
    assert core.pool.num_free == 0
    assert isinstance(resume(core), Granted)


def test_what_is_kept_has_a_lease_that_the_router_renews() -> None:
    core = half_way()
    assert core.on_router(Renew(requests=(KEY,)), 6.0) == []
    assert core.tick(10.0) == []
    (failed,) = said(core.tick(11.0))
    assert isinstance(failed, Failed)
    core.check()
    assert core.pool.num_free == 10
    assert said(core.on_router(Renew(requests=(KEY,)), 12.0)) == [Unknown(requests=(KEY,))]
    answer = resume(core, now=12.0)
    assert isinstance(answer, Granted)
    assert answer.arrived_tokens == ()


def test_without_room_for_the_tokens_that_came_since_nothing_is_kept() -> None:
    core = half_way(num_blocks=2)
    answer = resume(core, length=8, num_output_tokens=2, sampling=SamplingParams(max_tokens=3))
    assert isinstance(answer, Granted), "two blocks are enough without the token behind"
    core = half_way(num_blocks=3)
    core.on_router(request("other", length=3), 2.0)
    assert isinstance(resume(core, length=8, num_output_tokens=2, sampling=SamplingParams(max_tokens=9)), Busy)
    assert core.pool.num_free == 2


@pytest.mark.parametrize(
    "changes",
    [{"token_ids": (1, 2, 3, 4, 5, 6)}, {"length": 40}, {"remaining_ms": 0}, {"resumed_attempt": 7}],
)
def test_what_cannot_be_gone_on_from_is_given_back(changes: dict[str, Any]) -> None:
    """Another prompt, one that does not fit, no time left: whatever the answer, no block of the old attempt stays."""
    core = half_way()
    fields = {"attempt": 2, "resumed_attempt": 1} | changes
    (answer,) = said(core.on_router(request(**fields), 3.0))
    core.check()
    if "resumed_attempt" in changes:
        assert core.pool.holding(KEY) is not None, "nobody spoke of it"
        core.tick(20.0)
    assert core.pool.holding(KEY) is None
    assert isinstance(answer, Failed) or answer.arrived_tokens == ()


def test_an_attempt_that_runs_already_is_stopped_for_the_next() -> None:
    """Its last frames came after all: the router has decided otherwise, and the tokens are the same anyway."""
    core = half_way()
    part, done = rest(1)
    give(core, part.model_copy(update={"attempt": 1, "sequence": 1}))
    digest = extend_digest(extend_digest(0, 11), 11)
    give(core, done.model_copy(update={"attempt": 1, "num_frames": 2, "digest": digest}))
    assert len(core.scheduler) == 1
    answer = resume(core)
    assert isinstance(answer, Granted)
    assert (answer.arrived_tokens, len(core.scheduler)) == ((), 0)
