"""What a PROMPT worker decides: chunks, transfers, first tokens, and when blocks come home."""

from typing import Any

import pytest
from twinpool.cluster.protocol.messages import (
    Cancel,
    Failed,
    FirstToken,
    PeerGone,
    Prefill,
    PromptScores,
    Renew,
    SampledToken,
    SamplingParams,
    TimePasses,
    TimeTransfer,
    TransferTimed,
    Unknown,
    Welcome,
)
from twinpool.engine.sequence import StepOutput
from twinpool.kvtransfer.sender import Closed
from twinpool.prefill_worker.core import (
    AbortTransfer,
    FinishTransfer,
    ForgetPeer,
    OpenTransfer,
    PromptCommand,
    PromptCore,
    PromptLimits,
    TimeKV,
    ToRouter,
)

KEY = ("r", 1)
D = "completion-0/d"
AT_D = ("tcp://d",)


def prefill(name: str = "r", length: int = 10, **changes: Any) -> Prefill:
    fields: dict[str, Any] = {
        "request_id": name,
        "attempt": 1,
        "sampling": SamplingParams(max_tokens=5, stop_token_ids=(2,)),
        "generation": 7,
        "credit_bytes": 100,
        "num_cached_tokens": min(2, length),
        "receiver": D,
        "receiver_addresses": AT_D,
        "token_ids": tuple(range(100, 100 + length)),
    }
    return Prefill(**(fields | changes))


def new_core(num_blocks: int = 10, budget: int = 8) -> PromptCore:
    return PromptCore(PromptLimits(4, num_blocks, 60, budget, kv_bytes_per_token=32, lease_s=5.0, max_num_seqs=6))


def step(core: PromptCore, now: float, token: int = 50, arrived: int = 96) -> list[PromptCommand]:
    """Schedule and complete one step; return all commands."""
    rows, commands = core.schedule(now)
    sampled = [SampledToken(token=token) if row.samples else None for row in rows]
    scores = [[SampledToken(token=row.sequence.token_ids[i], logprob=-1.0) for i in row.scored] for row in rows]
    commands += core.completed(rows, StepOutput(list(sampled), scores), lambda key: arrived, now + 0.5)
    core.check()
    return commands


def kinds(commands: list[PromptCommand]) -> list[type]:
    return [type(command.message) if isinstance(command, ToRouter) else type(command) for command in commands]


def finished() -> PromptCore:
    """A prompt that is computed; its transfer is still open."""
    core = new_core()
    core.on_router(prefill(), 1.0)
    step(core, 2.0)
    step(core, 3.0)
    return core


def test_a_prompt_opens_its_transfer_runs_its_chunks_and_reports() -> None:
    core = new_core()
    message = prefill()
    assert core.on_router(message, 1.0) == []
    assert step(core, 2.0) == [OpenTransfer(KEY, message, [0, 1, 2])]
    report, finish = step(core, 3.0)
    assert isinstance(report, ToRouter)
    first = report.message
    assert isinstance(first, FirstToken)
    assert (first.request_id, first.attempt, first.position) == ("r", 1, 0)
    assert (first.token, first.finish_reason) == (SampledToken(token=50), None)
    stages = first.stages
    assert (stages.queue_s, stages.prefill_s, stages.num_computed_tokens) == (1.0, 1.5, 10)
    assert (stages.num_kv_bytes, stages.num_kv_bytes_arrived) == (8 * 32, 96), "two tokens were cached over there"
    assert isinstance(finish, FinishTransfer)
    assert (finish.key, finish.peer) == (KEY, AT_D)
    assert (finish.first_output.position, finish.first_output.token, finish.first_output.stages) == (
        0,
        first.token,
        stages,
    )
    assert core.pool.num_free == 7, "the transfer reads the blocks until it has closed"
    assert core.on_closed(Closed(KEY, "acked", ""), 9.0) == []
    assert core.pool.num_free == 10


@pytest.mark.parametrize("outcome", ["failed", "cancelled"])
def test_a_transfer_that_fails_behind_the_first_token_is_told(outcome: str) -> None:
    """Regression: nobody was told, and the request waited until its lease at the receiver ran out."""
    core = finished()
    (answer,) = core.on_closed(Closed(KEY, outcome, "the receiver refused"), 4.0)
    assert answer == ToRouter(Failed(request_id="r", attempt=1, reason="the receiver refused"))
    assert core.pool.num_free == 10


def test_a_transfer_that_fails_when_nobody_wants_it_any_more_is_not_told() -> None:
    core = finished()
    core.on_router(Cancel(request_id="r", attempt=1), 4.0)
    assert core.on_closed(Closed(KEY, "cancelled", "cancelled by the router"), 4.0) == []


def test_only_what_has_not_arrived_yet_is_counted_as_kv_to_move() -> None:
    core = new_core(budget=20)
    core.on_router(prefill(arrived_tokens=(10, 5, 0, 5), num_cached_tokens=0), 1.0)
    _, report, _ = step(core, 2.0)
    assert isinstance(report, ToRouter)
    assert isinstance(report.message, FirstToken)
    assert report.message.stages.num_kv_bytes == 32 * 5


def test_a_request_that_ends_at_its_first_token_sends_no_done() -> None:
    core = new_core()
    core.on_router(prefill(length=3), 1.0)
    commands = step(core, 2.0, token=2)
    assert kinds(commands) == [OpenTransfer, FirstToken, AbortTransfer]
    report = commands[1]
    assert isinstance(report, ToRouter)
    assert isinstance(report.message, FirstToken)
    assert report.message.finish_reason == "stop"
    assert isinstance(commands[2], AbortTransfer)
    assert commands[2].is_finished
    core.on_closed(Closed(KEY, "cancelled", "x"), 9.0)
    assert core.pool.num_free == 10


def test_scores_go_to_the_router_chunk_by_chunk_before_the_first_token() -> None:
    """At most 64 a message, from the second token on, and nothing of them to the COMPLETION worker."""
    core = PromptCore(PromptLimits(4, 100, 400, 90, kv_bytes_per_token=32, lease_s=5.0, max_num_seqs=6))
    sampling = SamplingParams(max_tokens=5, scores_prompt=True, num_logprobs=1)
    core.on_router(prefill(length=100, sampling=sampling), 1.0)
    commands = [*step(core, 2.0), *step(core, 3.0)]
    assert kinds(commands) == [OpenTransfer, PromptScores, PromptScores, PromptScores, FirstToken, FinishTransfer]
    messages = [command.message for command in commands if isinstance(command, ToRouter)]
    scores = [message for message in messages if isinstance(message, PromptScores)]
    assert [(message.position, len(message.tokens)) for message in scores] == [(1, 64), (65, 26), (91, 9)]
    assert [token.token for message in scores for token in message.tokens] == list(range(101, 200))


@pytest.mark.parametrize(("num_output_tokens", "reason"), [(0, None), (3, None), (4, "length")])
def test_outputs_of_earlier_attempts_count(num_output_tokens: int, reason: str | None) -> None:
    core = new_core()
    core.on_router(prefill(length=6, num_output_tokens=num_output_tokens), 1.0)
    first = next(c.message for c in step(core, 2.0) if isinstance(c, ToRouter))
    assert isinstance(first, FirstToken)
    assert (first.position, first.finish_reason) == (num_output_tokens, reason)


@pytest.mark.parametrize(
    "message",
    [prefill(length=0), prefill(length=61), prefill(length=41), prefill(length=3, num_output_tokens=3)],
    ids=["empty", "beyond the context", "beyond the blocks", "no prompt before the outputs"],
)
def test_a_prompt_that_can_never_run_is_refused_for_good(message: Prefill) -> None:
    core = new_core()
    (failed,) = core.on_router(message, 1.0)
    assert isinstance(failed, ToRouter)
    assert isinstance(failed.message, Failed)
    assert (failed.message.is_retryable, failed.message.is_too_long) == (False, True)
    assert core.load().num_queued_tokens == 0


def test_a_prompt_that_just_fits_is_taken() -> None:
    assert new_core().on_router(prefill(length=40), 1.0) == []
    assert new_core(20).on_router(prefill(length=60), 1.0) == []


def test_a_prefill_that_comes_twice_runs_once() -> None:
    core = new_core()
    core.on_router(prefill(), 1.0)
    core.on_router(prefill(), 1.1)
    assert core.load().num_queued_tokens == 10
    assert kinds(step(core, 2.0)) == [OpenTransfer]
    core.on_router(prefill(), 2.6)
    assert kinds(step(core, 3.0)) == [FirstToken, FinishTransfer], "the transfer is open, the first chunk has run"
    assert core.on_router(prefill(), 3.6) == []
    assert core.schedule(4.0) == ([], [])


def test_cancel_before_the_first_chunk_tells_the_receiver() -> None:
    """Regression: nobody told it, and the granted blocks lay idle until their lease ran out."""
    core = new_core()
    message = prefill()
    core.on_router(message, 1.0)
    commands = core.on_router(Cancel(request_id="r", attempt=1), 1.1)
    assert commands == [OpenTransfer(KEY, message, []), AbortTransfer(KEY, AT_D, "cancelled by the router")]
    assert core.schedule(2.0) == ([], [])
    assert core.deadline() is None
    assert core.on_closed(Closed(KEY, "cancelled", "cancelled by the router"), 9.0) == []
    assert core.load().num_transfers == 0
    core.check()


def test_cancel_between_chunks_aborts_and_keeps_the_blocks_until_it_has_closed() -> None:
    core = new_core()
    core.on_router(prefill(), 1.0)
    step(core, 2.0)
    assert core.on_router(Cancel(request_id="r", attempt=2), 2.5) == [], "another attempt"
    assert core.on_router(Cancel(request_id="r", attempt=1), 2.5) == [
        AbortTransfer(KEY, AT_D, "cancelled by the router")
    ]
    assert core.schedule(3.0) == ([], [])
    assert core.pool.num_free == 7
    core.check()
    assert core.on_closed(Closed(KEY, "cancelled", "x"), 9.0) == [], "the router knows"
    assert core.pool.num_free == 10


def test_cancel_after_the_first_token_still_stops_the_transfer() -> None:
    core = finished()
    assert kinds(core.on_router(Cancel(request_id="r", attempt=1), 4.0)) == [AbortTransfer]


def test_a_transfer_that_fails_while_the_prompt_runs_fails_the_attempt() -> None:
    core = new_core()
    core.on_router(prefill(), 1.0)
    step(core, 2.0)
    (failed,) = core.on_closed(Closed(KEY, "cancelled", "the receiver was silent"), 9.0)
    assert failed == ToRouter(Failed(request_id="r", attempt=1, reason="the receiver was silent"))
    assert core.schedule(3.0) == ([], [])
    assert core.pool.num_free == 10


def test_a_prompt_that_is_not_renewed_is_given_up() -> None:
    core = new_core()
    core.on_router(prefill(), 1.0)
    core.on_router(prefill("other"), 1.0)
    step(core, 2.0)
    assert core.deadline() == 6.0
    assert core.on_router(Renew(requests=(("other", 1),)), 3.0) == []
    assert core.tick(5.9) == []
    assert kinds(core.tick(6.0)) == [Failed, AbortTransfer]
    assert core.tick(6.1) == [], "once"
    assert core.deadline() == 8.0
    core.check()


def test_what_is_computed_needs_no_renewal() -> None:
    """Its transfer has a lease of its own, and the router no longer counts on us."""
    core = finished()
    assert core.deadline() is None
    assert core.tick(1000.0) == []


def test_a_renewal_is_answered_with_what_is_not_here() -> None:
    core = new_core()
    core.on_router(prefill(), 1.0)
    (answer,) = core.on_router(Renew(requests=(("r", 1), ("r", 2)), prefilled=(("x", 1),)), 2.0)
    assert answer == ToRouter(Unknown(requests=(("r", 2), ("x", 1))))
    assert core.deadline() == 7.0


def test_a_dead_receiver_ends_every_transfer_to_it() -> None:
    """Its connection is closed as a whole: no abort a transfer, no failure that the router knows already."""
    core = new_core(budget=12)
    core.on_router(prefill(), 1.0)
    core.on_router(prefill("other", receiver="completion-1/d", receiver_addresses=("tcp://e",)), 1.0)
    step(core, 2.0)
    core.on_router(prefill("queued"), 2.5)
    commands = core.on_router(PeerGone(worker=D), 3.0)
    assert commands == [ForgetPeer(AT_D)]
    assert core.on_closed(Closed(KEY, "failed", "gone"), 9.0) == []
    core.check()
    assert core.scheduler.keys() == [("other", 1)]
    assert core.on_router(Cancel(request_id="queued", attempt=1), 4.0) == []


def test_a_cancel_after_the_peers_death_sends_nothing() -> None:
    core = new_core()
    core.on_router(prefill(), 1.0)
    step(core, 2.0)
    core.on_router(PeerGone(worker=D), 3.0)
    assert core.on_router(Cancel(request_id="r", attempt=1), 3.1) == [], "its connection is gone"


def test_a_new_process_of_the_receiver_replaces_the_old_one() -> None:
    """Regression: across a router's restart nobody said PeerGone, and thread and connection to the old one stayed."""
    core = new_core()
    core.on_router(prefill(), 1.0)
    step(core, 2.0)
    assert core.on_router(prefill("same"), 2.5) == []
    elsewhere = prefill("elsewhere", receiver="completion-1/a", receiver_addresses=("tcp://a",))
    assert core.on_router(elsewhere, 2.5) == []
    new: dict[str, Any] = {"receiver": "completion-0/e", "receiver_addresses": ("tcp://e",)}
    assert core.on_router(prefill("new", **new), 3.0) == [], "something is still sent to the old one"
    core.on_closed(Closed(KEY, "failed", "the receiver was silent"), 3.5)
    core.on_router(Cancel(request_id="same", attempt=1), 3.6)
    core.on_closed(Closed(("same", 1), "cancelled", "x"), 3.7)
    assert core.tick(3.8) == [ForgetPeer(AT_D)]
    assert core.tick(3.9) == []
    core.check()
    assert core.on_router(prefill("newer", **new), 4.0) == []
    assert core.on_router(prefill("late"), 4.1) == [], "of a router that has yet to notice; the new ones go on"
    assert core.scheduler.keys() == [("elsewhere", 1), ("new", 1), ("newer", 1), ("late", 1)]


def test_a_replaced_process_to_which_nothing_is_sent_is_forgotten_at_once() -> None:
    core = new_core()
    core.on_router(prefill(), 1.0)
    step(core, 2.0)
    core.on_closed(Closed(KEY, "acked", ""), 2.5)
    new = prefill("new", receiver="completion-0/e", receiver_addresses=("tcp://e",))
    assert core.on_router(new, 3.0) == [ForgetPeer(AT_D)]


def test_another_incarnation_of_the_same_process_is_the_same_peer() -> None:
    """Each router has its own name for a COMPLETION process; transfers for all of them share one connection."""
    core = new_core()
    core.on_router(prefill(), 1.0)
    step(core, 2.0)
    assert core.on_router(prefill("others", receiver="completion-0/z"), 2.5) == []
    assert core.tick(2.6) == []
    assert core.scheduler.keys() == [KEY, ("others", 1)]


def test_the_word_of_one_router_that_a_peer_is_gone_touches_only_its_own_prompts() -> None:
    """The connection stays as long as another router's prompts use it; over it the peer hears of what ends."""
    core = new_core()
    core.on_router(prefill(), 1.0)
    step(core, 2.0)
    core.on_router(prefill("others", receiver="completion-0/z"), 2.5)
    assert core.on_router(PeerGone(worker=D), 3.0) == [AbortTransfer(KEY, AT_D, "the COMPLETION worker is gone")]
    core.on_closed(Closed(KEY, "cancelled", "gone"), 3.1)
    assert core.scheduler.keys() == [("others", 1)]
    assert core.on_router(PeerGone(worker=D), 3.2) == [], "said again, when nothing of its own is left"
    assert core.on_router(PeerGone(worker="completion-0/z"), 4.0) == [ForgetPeer(AT_D)]
    core.check()


def test_a_peer_that_one_router_lost_and_another_still_sees_gets_a_connection_of_its_own() -> None:
    """The first one's transfers close with the old connection: nothing may be said of them on the new one."""
    core = new_core()
    core.on_router(prefill(), 1.0)
    step(core, 2.0)
    assert core.on_router(PeerGone(worker=D), 3.0) == [ForgetPeer(AT_D)]
    core.on_router(prefill("others", receiver="completion-0/z"), 3.1)
    assert core.on_router(PeerGone(worker=D), 3.2) == []
    assert core.reset(core.request_ids()) == [
        OpenTransfer(("others", 1), prefill("others", receiver="completion-0/z"), []),
        AbortTransfer(("others", 1), AT_D, "the router is gone"),
    ]


def test_a_step_that_raises_fails_its_requests_and_the_worker_lives() -> None:
    core = new_core()
    core.on_router(prefill(), 1.0)
    rows, _ = core.schedule(2.0)
    assert kinds(core.failed(rows, "prefill failed: RuntimeError")) == [Failed, AbortTransfer]
    core.on_closed(Closed(KEY, "cancelled", "x"), 9.0)
    assert core.pool.num_free == 10
    core.on_router(prefill("next"), 3.0)
    assert kinds(step(core, 4.0)) == [OpenTransfer]


def test_reset_drops_everything() -> None:
    core = new_core(budget=4)
    core.on_router(prefill(), 1.0)
    step(core, 2.0)
    queued = prefill("queued")
    core.on_router(queued, 2.5)
    assert core.reset(core.request_ids()) == [
        AbortTransfer(KEY, AT_D, "the router is gone"),
        OpenTransfer(("queued", 1), queued, []),
        AbortTransfer(("queued", 1), AT_D, "the router is gone"),
    ]
    assert len(core.scheduler) == 0
    for key in (KEY, ("queued", 1)):
        core.on_closed(Closed(key, "cancelled", "x"), 9.0)
    assert core.pool.num_free == 10


def test_reset_leaves_what_another_router_asked_for() -> None:
    core = new_core()
    core.on_router(prefill("mine"), 1.0)
    core.on_router(prefill("others"), 1.0)
    core.on_router(PASSES, 1.0)
    assert kinds(core.reset({"mine", "never heard of"})) == [OpenTransfer, AbortTransfer]
    core.on_closed(Closed(("mine", 1), "cancelled", "x"), 1.5)
    assert core.request_ids() == {"others"}
    assert core.scheduler.keys() == [("others", 1)]
    core = new_core()
    core.on_router(PASSES, 1.0)
    assert core.reset({"others"}) == []
    assert core.probe.is_active
    assert core.request_ids() == {"p"}


def test_load_says_what_is_left_to_do() -> None:
    core = new_core()
    core.on_router(prefill(), 1.0)
    core.on_router(prefill("other", length=4), 1.0)
    step(core, 2.0)  # the short one goes first, 4 tokens of the long one beside it
    load = core.load()
    assert (load.num_queued_tokens, load.num_sequences, load.num_transfers, load.num_free_blocks) == (6, 1, 2, 6)


def test_the_measured_rate_orders_the_queue() -> None:
    """Slow: a short newcomer overtakes a waiting long one. Fast: first come, first served."""
    for tokens_per_s, first in ((1.0, "short"), (1e9, "long")):
        core = new_core(20, budget=30)
        for _ in range(60):
            core.measured(16, 16 / tokens_per_s)
        core.measured(1, 1e-9)  # too small a step to learn from
        core.on_router(prefill("long", length=30), 1.0)
        core.on_router(prefill("short", length=3), 2.0)
        rows, _ = core.schedule(3.0)
        assert rows[0].sequence.request_id == first


def test_other_messages_mean_nothing_here() -> None:
    assert new_core().on_router(Welcome(router_incarnation="x"), 0.0) == []


PROBE = ("p", 0)
PASSES = TimePasses(probe_id="p", rows=((0, 8),), num_warmup=0, num_repeats=2, limit_s=9.0)


def time_transfer(num_tokens: int = 10) -> TimeTransfer:
    return TimeTransfer(
        probe_id="p", num_tokens=num_tokens, generation=7, credit_bytes=100, receiver=D, receiver_addresses=("tcp://d",)
    )


def core_with_transfer() -> PromptCore:
    core = new_core()
    core.on_router(time_transfer(), 1.0)
    core.transfer_began(PROBE, 1.5)
    return core


def test_a_timed_transfer_is_sent_at_once_and_reported_when_it_is_acknowledged() -> None:
    core = new_core()
    (command,) = core.on_router(time_transfer(), 1.0)
    assert isinstance(command, TimeKV)
    assert (command.key, command.block_table, command.num_tokens) == (PROBE, [0, 1, 2], 10)
    assert (command.prefill.receiver, command.prefill.generation, command.prefill.num_cached_tokens) == (D, 7, 0)
    assert core.on_router(time_transfer(), 1.1) == [], "delivered twice"
    core.check()
    assert core.schedule(1.2) == ([], []), "nothing is computed"
    core.transfer_began(PROBE, 1.5)
    assert core.tick(99.0) == [], "only the transfer's own deadlines end it"
    assert core.on_closed(Closed(PROBE, "acked", ""), 1.75) == [ToRouter(TransferTimed(probe_id="p", transfer_s=0.25))]
    assert core.pool.num_free == 10


def test_a_timed_transfer_that_fails_says_why() -> None:
    core = core_with_transfer()
    assert kinds(core.on_router(Cancel(request_id="p", attempt=0), 2.0)) == [AbortTransfer]
    (failed,) = core.on_closed(Closed(PROBE, "cancelled", "cancelled by the router"), 2.1)
    assert failed == ToRouter(Failed(request_id="p", attempt=0, reason="cancelled by the router"))
    core = core_with_transfer()
    assert core.on_router(PeerGone(worker=D), 2.0) == [ForgetPeer(AT_D)]
    assert kinds(core.on_closed(Closed(PROBE, "failed", "gone"), 2.1)) == [Failed]
    core = core_with_transfer()
    assert kinds(core.reset(core.request_ids())) == [AbortTransfer]
    core.on_closed(Closed(PROBE, "cancelled", "x"), 2.1)
    assert core.pool.num_free == 10
    core.check()


def test_a_timed_transfer_that_does_not_fit_is_refused_with_both_numbers() -> None:
    (refused,) = new_core().on_router(time_transfer(41), 1.0)
    reason = "41 tokens take 11 KV blocks; the worker has 10"
    assert refused == ToRouter(Failed(request_id="p", attempt=0, reason=reason, is_retryable=False))


@pytest.mark.parametrize("probe", [PASSES, time_transfer()])
@pytest.mark.parametrize("other", [prefill(), PASSES.model_copy(update={"probe_id": "o"}), time_transfer()])
def test_a_worker_with_anything_to_do_refuses_a_probe(
    probe: TimePasses | TimeTransfer, other: Prefill | TimePasses | TimeTransfer
) -> None:
    core = new_core()
    core.on_router(other.model_copy(update={"probe_id": "o"}) if isinstance(other, TimeTransfer) else other, 1.0)
    (refused,) = core.on_router(probe, 1.1)
    assert refused == ToRouter(Failed(request_id="p", attempt=0, reason="the worker is not idle"))
    core.check()


def test_timed_passes_give_way_to_a_prompt() -> None:
    core = new_core()
    assert core.on_router(PASSES, 1.0) == []
    core.check()
    core.on_router(prefill(), 1.1)
    (ended,) = core.tick(1.2)
    assert ended == ToRouter(Failed(request_id="p", attempt=0, reason="other work came meanwhile"))
    assert kinds(step(core, 1.3)) == [OpenTransfer]


@pytest.mark.parametrize("end", [Cancel(request_id="p", attempt=0), None])
def test_timed_passes_end_with_the_router_or_at_its_word(end: Cancel | None) -> None:
    core = new_core()
    core.on_router(PASSES, 1.0)
    assert (core.reset(core.request_ids()) if end is None else core.on_router(end, 1.1)) == []
    assert not core.probe.is_active
    assert core.pool.num_free == 10


def test_a_prompt_that_no_worker_could_sample_fails_for_good() -> None:
    core = new_core()
    core.on_router(prefill(), 1.0)
    rows, _ = core.schedule(2.0)
    failed = core.failed(rows, "the grammar cannot go on", is_retryable=False)[0]
    assert isinstance(failed, ToRouter)
    assert isinstance(failed.message, Failed)
    assert not failed.message.is_retryable


def late_by(core: PromptCore, now: float) -> tuple[list[type], Failed]:
    """Tick at `now`; return what was done, and what was said about a prompt that nobody wants any more."""
    commands = core.tick(now)
    said = next(c.message for c in commands if isinstance(c, ToRouter))
    assert isinstance(said, Failed)
    return kinds(commands), said


def test_a_prompt_whose_time_has_passed_is_never_begun() -> None:
    """Its receiver is told as well: it reuses the granted blocks only on our word."""
    core = new_core()
    core.on_router(prefill(remaining_ms=1500), 1.0)
    assert core.tick(2.4) == []
    assert core.deadline() == 2.5, "the worker wakes up for it"
    done, said = late_by(core, 2.5)
    assert done == [Failed, OpenTransfer, AbortTransfer]
    assert (said.is_expired, said.is_retryable) == (True, False)
    assert core.schedule(2.5) == ([], [])
    core.on_closed(Closed(KEY, "cancelled", "x"), 3.0)
    assert core.pool.num_free == 10


def test_a_prompt_whose_time_passes_between_chunks_gets_no_other_one() -> None:
    core = new_core()
    core.on_router(prefill(remaining_ms=1500), 1.0)
    step(core, 2.0)
    assert late_by(core, 2.5)[0] == [Failed, AbortTransfer]
    assert core.schedule(2.5) == ([], [])
    assert core.tick(9.0) == [], "it is given up once"
    core.on_closed(Closed(KEY, "cancelled", "x"), 9.0)
    core.check()
    assert core.pool.num_free == 10


def test_a_prompt_that_is_computed_in_time_is_sent() -> None:
    core = new_core()
    core.on_router(prefill(remaining_ms=3000), 1.0)
    step(core, 2.0)
    assert FinishTransfer in kinds(step(core, 3.0))
    assert core.tick(4.0) == []
