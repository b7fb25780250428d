"""What a COMPLETION worker decides: grants, transfers, tokens, handbacks, leases."""

import pytest
from completion_core import KEY, STAGES, done, frame, give, new_core, request, said, start, step
from twinpool.cluster.protocol.messages import (
    Busy,
    Cancel,
    Failed,
    Granted,
    GrantRequest,
    Handback,
    Renew,
    SamplingParams,
    TimePasses,
    Tokens,
    Unknown,
    Welcome,
)
from twinpool.decode_worker.core import (
    MAX_SEQUENCES_PER_MESSAGE,
    ToRouter,
    ToSender,
    WriteKV,
)
from twinpool.kvtransfer.frames import Ack, Cancelled, Credit, Reject


@pytest.mark.parametrize("length", [30, 31])
@pytest.mark.parametrize("num_output_tokens", [0, 3])
def test_a_prompt_may_fill_the_context_when_its_first_token_is_the_last(length: int, num_output_tokens: int) -> None:
    """Regression: a prompt of the whole context could not be scored, for want of room for a token that never comes."""
    sampling = SamplingParams(max_tokens=num_output_tokens + 1)
    message = request(length=length, num_output_tokens=num_output_tokens, sampling=sampling)
    (answer,) = new_core().on_router(message, 1.0)
    assert isinstance(answer, ToRouter)
    assert isinstance(answer.message, Granted if length == 30 else Failed)
    more = message.model_copy(update={"sampling": SamplingParams(max_tokens=num_output_tokens + 2)})
    (answer,) = new_core().on_router(more, 1.0)
    assert isinstance(answer, ToRouter)
    assert isinstance(answer.message, Failed)


def test_a_grant_reserves_blocks_for_the_prompt_and_one_token() -> None:
    core = new_core()
    (granted,) = said(core.on_router(request(length=8), 1.0))
    assert granted == Granted(request_id="r", attempt=1, generation=1, credit_bytes=1000, num_free_blocks=7)
    assert core.load().num_granted_blocks == 3, "8 tokens and one more"
    core.check()


def test_a_request_runs_from_grant_to_its_end() -> None:
    core = new_core()
    core.on_router(request(), 1.0)
    write, credit = give(core, frame())
    assert write == WriteKV(KEY, 1, [0, 1], range(2), range(6))
    assert credit == ToSender(Credit(request_id="r", attempt=1, generation=1, num_bytes=frame().num_bytes))
    assert give(core, done(), 2.5) == [ToSender(Ack(request_id="r", attempt=1, generation=1))]
    assert core.load().num_granted_blocks == 0
    (first,) = step(core, 3.0, token=60)
    assert isinstance(first, Tokens)
    (report,) = first.sequences
    assert (report.position, [t.token for t in report.tokens], report.finish_reason) == (0, [50, 60], None)
    assert report.stages is not None
    assert (report.stages.since_last_kv_s, report.stages.prefill) == (0.5, STAGES)
    (second,) = step(core, token=61)
    assert isinstance(second, Tokens)
    assert (second.sequences[0].position, second.sequences[0].stages) == (2, None)
    (last,) = step(core, token=62)
    assert isinstance(last, Tokens)
    assert (last.sequences[0].position, last.sequences[0].finish_reason) == (3, "length")
    assert last.num_free_blocks == 10, "counted after the blocks came home"
    assert core.schedule() == ([], [])


@pytest.mark.parametrize(("token", "reason"), [(2, "stop"), (3, None)])
def test_a_stop_token_ends_the_sequence(token: int, reason: str | None) -> None:
    core = new_core()
    start(core)
    (message,) = step(core, token=token)
    assert isinstance(message, Tokens)
    assert message.sequences[0].finish_reason == reason
    assert core.pool.num_free == (10 if reason else 8)


def test_the_context_ends_the_sequence() -> None:
    core = new_core(max_model_len=8)
    start(core, length=6, sampling=SamplingParams(max_tokens=100))
    (message,) = step(core)
    assert isinstance(message, Tokens)
    assert message.sequences[0].finish_reason == "length", "6 of prompt, 2 of output"


def test_outputs_of_earlier_attempts_count() -> None:
    core = new_core()
    start(core, length=6, num_output_tokens=2)  # two outputs known, the third came with Done
    (message,) = step(core)
    assert isinstance(message, Tokens)
    assert (message.sequences[0].position, message.sequences[0].finish_reason) == (2, "length")


@pytest.mark.parametrize(
    "message",
    [request(length=0), request(length=30), request(length=3, num_output_tokens=3)],
    ids=["empty", "as long as the context", "no prompt before the outputs"],
)
def test_what_can_never_run_is_refused_for_good(message: GrantRequest) -> None:
    core = new_core()
    (failed,) = said(core.on_router(message, 1.0))
    assert isinstance(failed, Failed)
    assert (failed.is_retryable, failed.is_too_long) == (False, True)
    assert core.pool.num_free == 10


def test_a_prompt_larger_than_all_blocks_is_refused_and_one_that_fits_is_not() -> None:
    core = new_core(max_model_len=100)
    (failed,) = said(core.on_router(request(length=40), 1.0))
    assert isinstance(failed, Failed)
    assert isinstance(said(core.on_router(request(length=39), 1.0))[0], Granted)


def test_without_room_the_answer_is_busy() -> None:
    """Room means: the blocks asked for, and one for each running sequence, so that a grant preempts nobody soon."""
    core = new_core()
    start(core)  # 2 blocks
    (busy,) = said(core.on_router(request("b", length=29, sampling=SamplingParams()), 1.0))
    assert busy == Busy(request_id="b", attempt=1, num_free_blocks=8), "8 blocks are asked for and 8 are free"
    assert isinstance(said(core.on_router(request("c", length=27), 1.0))[0], Granted), "7 leave one"
    core.check()


def test_max_num_seqs_counts_grants_too() -> None:
    core = new_core(max_num_seqs=2)
    answers = [said(core.on_router(request(name, length=1), 1.0))[0] for name in "abc"]
    assert [type(answer) for answer in answers] == [Granted, Granted, Busy]


def test_a_grant_request_that_comes_twice_reserves_once() -> None:
    core = new_core()
    core.on_router(request(), 1.0)
    assert core.on_router(request(), 1.1) == []
    assert core.pool.num_free == 8


def test_a_wrong_frame_writes_nothing_and_fails_the_attempt() -> None:
    core = new_core()
    core.on_router(request(), 1.0)
    reject, failed = core.on_data(frame(), frame().num_bytes, False, 2.0)
    assert isinstance(reject, ToSender)
    assert isinstance(reject.message, Reject)
    assert failed == ToRouter(Failed(request_id="r", attempt=1, reason="the checksum is wrong"))
    assert core.pool.num_free == 8, "the sender may still be sending"
    core.check()
    give(core, Cancelled(request_id="r", attempt=1, generation=1))
    assert core.pool.num_free == 10
    assert core.load().num_dropped_frames == 1


def test_a_frame_of_an_old_generation_writes_nothing() -> None:
    """I2: the key is granted again, the late frame of before is not for its blocks."""
    core = new_core()
    core.on_router(request(), 1.0)
    core.on_router(Cancel(request_id="r", attempt=1), 1.1)
    core.on_router(request(), 1.2)
    assert not any(isinstance(command, WriteKV) for command in give(core, frame(generation=1)))
    assert any(isinstance(command, WriteKV) for command in give(core, frame(generation=2)))


@pytest.mark.parametrize(("sender_is_active", "num_free"), [(False, 10), (True, 8)])
def test_a_cancelled_grant_waits_for_an_active_sender(sender_is_active: bool, num_free: int) -> None:
    core = new_core()
    core.on_router(request(), 1.0)
    cancel = Cancel(request_id="r", attempt=1, sender_is_active=sender_is_active)
    assert core.on_router(cancel, 1.1) == []
    assert core.pool.num_free == num_free
    core.check()
    assert give(core, Cancelled(request_id="r", attempt=1, generation=1)) == []
    assert core.pool.num_free == 10


def test_a_cancelled_sequence_is_gone_at_once() -> None:
    core = new_core()
    start(core)
    core.on_router(Cancel(request_id="r", attempt=2), 3.0)
    assert len(core.scheduler) == 1, "another attempt"
    core.on_router(Cancel(request_id="r", attempt=1, sender_is_active=True), 3.0)
    assert (core.pool.num_free, len(core.scheduler)) == (10, 0)
    core.check()


def test_the_newest_is_handed_back_when_blocks_run_out_and_can_come_again() -> None:
    """Never lost: the router is told, and the same request under a new attempt continues."""
    core = new_core(num_blocks=4)
    start(core, "old", length=3, generation=1, arrival_order=1, sampling=SamplingParams(max_tokens=100))
    start(core, "new", length=3, generation=2, arrival_order=2, sampling=SamplingParams(max_tokens=100))
    handed_back: list[Handback] = []
    for _ in range(8):
        handed_back += [m for m in step(core) if isinstance(m, Handback)]
    assert handed_back == [Handback(request_id="new", attempt=1, num_output_tokens=6, num_free_blocks=1)]
    assert core.load().num_preemptions == 1
    assert core.scheduler.keys() == [("old", 1)]
    assert said(core.on_router(Renew(prefilled=(("new", 1),)), 3.5)) == [Unknown(requests=(("new", 1),))]
    core.on_router(Cancel(request_id="old", attempt=1), 4.0)
    again = request("new", length=9, attempt=2, num_output_tokens=6, arrival_order=2)
    assert isinstance(said(core.on_router(again, 5.0))[0], Granted)


def test_a_transfer_without_frames_or_renewals_expires() -> None:
    core = new_core()
    core.on_router(request(), 1.0)
    assert core.deadline() == 6.0
    core.on_router(Renew(requests=(KEY,)), 3.0)
    assert core.deadline() == 8.0
    assert core.tick(7.9) == []
    (failed,) = said(core.tick(8.0))
    assert isinstance(failed, Failed)
    assert core.pool.num_free == 10
    core.check()


def test_a_prefilled_transfer_lives_by_its_frames_alone() -> None:
    """The PROMPT worker is done: silence now means that nothing will come."""
    core = new_core()
    core.on_router(request(), 1.0)
    assert core.on_router(Renew(prefilled=(KEY,)), 4.0) == []
    assert [type(m) for m in said(core.tick(6.0))] == [Failed]


def test_a_sequence_that_is_not_renewed_is_given_up() -> None:
    core = new_core()
    start(core)  # granted at 1.0
    assert core.deadline() == 6.0
    core.on_router(Renew(prefilled=(KEY,)), 4.0)
    assert core.deadline() == 9.0
    assert core.tick(8.9) == []
    (failed,) = said(core.tick(9.0))
    assert isinstance(failed, Failed)
    assert core.pool.num_free == 10
    assert core.deadline() is None


def test_a_renewal_is_answered_with_what_is_not_here() -> None:
    """A transfer that only waits for its sender's last word is not here any more, either."""
    core = new_core()
    core.on_router(request(), 1.0)
    core.on_router(request("cancelled"), 1.0)
    core.on_router(Cancel(request_id="cancelled", attempt=1, sender_is_active=True), 1.1)
    start(core, "running", length=2, generation=3)
    renew = Renew(requests=(KEY, ("cancelled", 1), ("nobody", 1)), prefilled=(("running", 1), ("gone", 2)))
    (answer,) = said(core.on_router(renew, 2.0))
    assert answer == Unknown(requests=(("cancelled", 1), ("nobody", 1), ("gone", 2)))


def test_a_sender_that_stops_by_itself_fails_the_attempt() -> None:
    core = new_core()
    core.on_router(request(), 1.0)
    (failed,) = said(give(core, Cancelled(request_id="r", attempt=1, generation=1)))
    assert isinstance(failed, Failed)
    assert core.pool.num_free == 10


def test_a_step_that_raises_fails_its_requests_and_the_worker_lives() -> None:
    core = new_core()
    start(core)
    rows, _ = core.schedule()
    (failed,) = said(core.failed(rows, "decode failed: RuntimeError", 3.0))
    assert isinstance(failed, Failed)
    assert failed.is_retryable
    assert core.pool.num_free == 10
    core.check()


def test_reset_drops_everything_but_waits_for_senders() -> None:
    core = new_core()
    start(core, "running")
    core.on_router(request(), 1.0)
    assert core.request_ids() == {"running", "r"}
    core.reset(core.request_ids(), 3.0)
    assert len(core.scheduler) == 0
    assert core.pool.num_free == 8
    assert core.tick(8.0) == [], "nobody is left to tell"
    assert core.pool.num_free == 10


def test_reset_leaves_what_another_router_asked_for() -> None:
    core = new_core()
    start(core, "mine")
    start(core, "others", generation=2)
    core.on_router(PASSES, 1.0)
    core.reset({"mine", "p", "never heard of"}, 3.0)
    assert core.request_ids() == {"others"}
    assert core.scheduler.keys() == [("others", 1)]
    core.check()
    core.on_router(Cancel(request_id="others", attempt=1), 3.1)
    core.on_router(PASSES.model_copy(update={"probe_id": "others"}), 4.0)
    core.reset({"mine"}, 4.1)
    assert core.probe.is_active
    assert core.request_ids() == {"others"}


def test_many_sequences_are_reported_in_messages_of_bounded_size() -> None:
    core = new_core(num_blocks=300, max_num_seqs=100, max_num_batched_tokens=100)
    number = 2 * MAX_SEQUENCES_PER_MESSAGE + 3
    for i in range(number):
        start(core, f"s{i}", length=2, generation=i + 1)
    sizes = [len(message.sequences) for message in step(core) if isinstance(message, Tokens)]
    assert sizes == [MAX_SEQUENCES_PER_MESSAGE, MAX_SEQUENCES_PER_MESSAGE, 3]


def test_load_says_what_is_here() -> None:
    core = new_core()
    start(core, "running")
    core.on_router(request(), 1.0)
    load = core.load()
    assert (load.num_blocks, load.num_free_blocks, load.num_granted_blocks) == (10, 6, 2)
    assert (load.num_sequences, load.num_transfers) == (1, 1)


def test_other_messages_mean_nothing_here() -> None:
    assert new_core().on_router(Welcome(router_incarnation="x"), 0.0) == []
    assert new_core().on_data(Ack(request_id="r", attempt=1, generation=1), 0, True, 0.0) == []


PASSES = TimePasses(probe_id="p", rows=((5, 1), (0, 3)), num_warmup=0, num_repeats=2, limit_s=9.0)


def test_timed_passes_take_blocks_and_give_them_back() -> None:
    core = new_core()
    assert core.on_router(PASSES, 1.0) == []
    core.check()
    assert core.load().num_free_blocks == 10 - 2 - 1
    assert core.schedule() == ([], []), "a probe is no sequence of a request"
    assert core.on_router(Cancel(request_id="p", attempt=0), 1.1) == []
    assert not core.probe.is_active
    core.on_router(PASSES.model_copy(update={"probe_id": "q"}), 1.2)
    core.reset({"q"}, 1.3)
    core.check()
    assert core.pool.num_free == 10


def test_timed_passes_give_way_when_a_request_finds_no_room_beside_them() -> None:
    """Another router may ask for a grant: the one that measures has no say about its requests."""
    core = new_core()
    large = PASSES.model_copy(update={"rows": ((19, 1), (11, 1))})
    core.on_router(large, 1.0)
    assert core.load().num_free_blocks == 2
    failed, granted = said(core.on_router(request(length=10), 1.1))
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.is_retryable) == ("p", True)
    assert isinstance(granted, Granted)
    core.check()


def test_a_worker_with_a_grant_refuses_timed_passes() -> None:
    core = new_core()
    core.on_router(request(), 1.0)
    (refused,) = core.on_router(PASSES, 1.1)
    assert refused == ToRouter(Failed(request_id="p", attempt=0, reason="the worker is not idle"))
    give(core, frame(), 1.5)
    give(core, done(), 2.0)
    (refused,) = core.on_router(PASSES.model_copy(update={"probe_id": "q"}), 2.1)
    assert said([refused]), "a running sequence as well"
    core.check()


def test_timed_passes_give_way_to_a_grant() -> None:
    core = new_core()
    core.on_router(PASSES, 1.0)
    core.on_router(request(), 1.1)
    core.check()
    assert core.tick(1.2) == [ToRouter(Failed(request_id="p", attempt=0, reason="other work came meanwhile"))]
    assert core.pool.num_used("sequence") == 0
    core.check()


def test_a_row_that_no_worker_could_sample_fails_for_good_and_its_mates_go_on() -> None:
    core = new_core()
    start(core, "r")
    start(core, "mate", generation=2)
    rows, _ = core.schedule()
    broken = [row for row in rows if row.sequence.request_id == "r"]
    (failed,) = said(core.failed(broken, "the grammar cannot go on", 3.0, is_retryable=False))
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.is_retryable) == ("r", False)
    assert [row.sequence.request_id for row in core.schedule()[0]] == ["mate"]
    core.check()


def test_a_request_whose_time_has_passed_is_granted_nothing() -> None:
    core = new_core()
    (failed,) = said(core.on_router(request(remaining_ms=0), 1.0))
    assert isinstance(failed, Failed)
    assert (failed.is_expired, failed.is_retryable) == (True, False)
    assert core.pool.num_free == 10


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_sequence_whose_time_has_passed_takes_no_step(num_steps: int) -> None:
    """Before the first one as between two; its blocks are free at once."""
    core = new_core()
    start(core, remaining_ms=3000)
    for _ in range(num_steps):
        step(core, 3.0)
    assert core.tick(3.9) == []
    assert core.deadline() == 4.0, "the worker wakes up for it"
    (failed,) = said(core.tick(4.0))
    assert isinstance(failed, Failed)
    assert (failed.request_id, failed.is_expired, failed.is_retryable) == ("r", True, False)
    assert core.schedule() == ([], [])
    assert core.pool.num_free == 10
    core.check()


def test_time_that_passes_during_a_transfer_is_noticed_when_it_is_complete() -> None:
    core = new_core()
    core.on_router(request(remaining_ms=200), 1.0)
    give(core, frame(), 1.1)
    assert core.tick(1.5) == [], "the blocks may still be written to"
    give(core, done(), 2.0)
    assert [type(message) for message in said(core.tick(2.0))] == [Failed]
    assert core.schedule() == ([], [])
    assert core.pool.num_free == 10


def test_messages_about_transfers_that_nobody_granted_leave_no_trace() -> None:
    """However many there are: no entry, no block, nothing that would have to expire."""
    core = new_core()
    for number in range(200):
        name = f"unknown-{number}"
        assert [type(command) for command in give(core, frame(name))] == [ToSender], "refused"
        assert [type(command) for command in give(core, done(name))] == [ToSender]
        assert give(core, Cancelled(request_id=name, attempt=1, generation=1)) == []
        assert core.on_router(Cancel(request_id=name, attempt=1, sender_is_active=True), 2.0) == []
        core.on_router(Renew(requests=((name, 1),)), 2.0)
    load = core.load()
    assert (load.num_transfers, load.num_sequences, load.num_free_blocks) == (0, 0, 10)
    assert core.deadline() is None


def test_a_sequence_has_what_is_left_of_the_lease_that_the_router_gave_it() -> None:
    """Regression: a transfer that ended just after its router had died held its blocks for two leases."""
    core = new_core()
    core.on_router(request(), 1.0)
    give(core, frame(), 5.5)
    give(core, done(), 5.9)
    assert core.tick(5.95) == []
    (failed,) = said(core.tick(6.0))
    assert isinstance(failed, Failed)
    assert core.pool.num_free == 10
