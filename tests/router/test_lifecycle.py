"""One request from accepted to its single terminal event."""

import itertools
from collections.abc import Sequence

import pytest
from twinpool.cluster.protocol.identity import WorkerId
from twinpool.cluster.protocol.messages import (
    Cancel,
    DecodeStages,
    FirstToken,
    Granted,
    GrantRequest,
    Prefill,
    PrefillStages,
    SampledToken,
    SamplingParams,
    SequenceTokens,
)
from twinpool.router.generation import Finished, GenerationFailed, GenerationRequest, TokensSent
from twinpool.router.lifecycle import Emit, Lifecycle, Phase, RouterCommand, Send

P, D = WorkerId("prompt-0", "p"), WorkerId("completion-0", "d")
REQUEST = GenerationRequest("r", (5, 6, 7), SamplingParams(max_tokens=9, seed=4))
STAGES = PrefillStages(queue_s=0.25, prefill_s=1.5, num_computed_tokens=3, num_kv_bytes=300, num_kv_bytes_arrived=200)


def token(number: int) -> SampledToken:
    return SampledToken(token=100 + number)


def first(position: int = 0, reason: str | None = None, attempt: int = 1) -> FirstToken:
    return FirstToken(
        request_id="r", attempt=attempt, position=position, token=token(position), finish_reason=reason, stages=STAGES
    )


def tokens(start: int, stop: int, reason: str | None = None, since_last_kv_s: float | None = None) -> SequenceTokens:
    stages = None if since_last_kv_s is None else DecodeStages(since_last_kv_s=since_last_kv_s, prefill=STAGES)
    return SequenceTokens(
        request_id="r",
        attempt=1,
        position=start,
        tokens=tuple(token(i) for i in range(start, stop)),
        finish_reason=reason,
        stages=stages,
    )


def new(now: float = 0.0) -> Lifecycle:
    return Lifecycle(REQUEST, arrival_order=8, now=now, deadline_s=600.0)


def granting(now: float = 1.0) -> Lifecycle:
    lifecycle = new()
    lifecycle.ask(P, D, now)
    return lifecycle


def prefilling(now: float = 1.5) -> Lifecycle:
    lifecycle = granting()
    lifecycle.granted(grant(), ("tcp://d",), now)
    return lifecycle


def grant(num_cached_tokens: int = 1) -> Granted:
    return Granted(
        request_id="r",
        attempt=1,
        generation=77,
        credit_bytes=1000,
        num_cached_tokens=num_cached_tokens,
        num_free_blocks=5,
    )


def decoding(completion_has_reported: bool = True) -> Lifecycle:
    lifecycle = prefilling()
    lifecycle.first_token(first(), 4.0)
    if completion_has_reported:
        lifecycle.tokens(tokens(0, 2, since_last_kv_s=0.25), 5.0)
    return lifecycle


def sent(commands: Sequence[RouterCommand]) -> list[int]:
    """Return the tokens that the client gets, checked for their positions being consecutive."""
    result: list[int] = []
    for command in commands:
        if isinstance(command, Emit) and isinstance(command.event, TokensSent):
            result += [each.token for each in command.event.tokens]
    return result


def cancels(commands: Sequence[RouterCommand]) -> list[tuple[WorkerId, bool]]:
    return [
        (c.worker, c.message.sender_is_active)
        for c in commands
        if isinstance(c, Send) and isinstance(c.message, Cancel)
    ]


def test_a_request_asks_then_prefills_with_what_was_granted() -> None:
    lifecycle = new()
    (ask,) = lifecycle.ask(P, D, 1.0)
    assert ask == Send(
        D,
        GrantRequest(
            request_id="r",
            attempt=1,
            arrival_order=8,
            sampling=REQUEST.sampling,
            remaining_ms=599_000,
            token_ids=(5, 6, 7),
        ),
    )
    (prefill,) = lifecycle.granted(grant(), ("ipc://d", "tcp://d"), 1.5)
    assert prefill == Send(
        P,
        Prefill(
            request_id="r",
            attempt=1,
            sampling=REQUEST.sampling,
            generation=77,
            credit_bytes=1000,
            num_cached_tokens=1,
            receiver="completion-0/d",
            receiver_addresses=("ipc://d", "tcp://d"),
            remaining_ms=598_500,
            token_ids=(5, 6, 7),
        ),
    )


def test_a_second_grant_sends_no_second_prefill() -> None:
    assert prefilling().granted(grant(), (), 2.0) == []


def test_the_stages_add_up_to_the_ttft() -> None:
    """I5: accepted at 0, asked at 1, granted at 1.5, first token at 4."""
    lifecycle = prefilling()
    lifecycle.first_token(first(), 4.0)
    lifecycle.tokens(tokens(0, 2, since_last_kv_s=0.25), 5.0)
    *_, end = lifecycle.tokens(tokens(2, 3, "stop"), 6.0)
    assert isinstance(end, Emit)
    assert isinstance(end.event, Finished)
    line = end.event.timeline
    assert (line.queue_s, line.grant_s, line.prefill_queue_s, line.prefill_s, line.return_s) == (
        1,
        0.5,
        0.25,
        1.5,
        0.75,
    )
    assert line.ttft_s == 4.0
    assert (line.last_kv_s, line.second_token_s, line.end_s) == (0.75, 1.0, 6.0)
    assert (line.num_prompt_tokens, line.num_output_tokens, line.num_cached_tokens) == (3, 3, 1)
    assert (line.num_attempts, line.num_preemptions) == (1, 0)
    assert (line.num_kv_bytes, line.num_kv_bytes_arrived) == (300, 200)


def test_the_ttft_is_right_when_the_completion_worker_is_heard_first() -> None:
    """I5 also then: the prefill's stages come with its first report."""
    lifecycle = prefilling()
    lifecycle.tokens(tokens(0, 2, since_last_kv_s=0.5), 4.0)
    lifecycle.first_token(first(), 4.5)
    *_, end = lifecycle.tokens(tokens(2, 3, "length"), 6.0)
    assert isinstance(end, Emit)
    assert isinstance(end.event, Finished)
    assert end.event.timeline.ttft_s == 4.0
    assert end.event.timeline.return_s == 0.75
    assert (end.event.timeline.last_kv_s, end.event.timeline.second_token_s) == (-0.5, 0.0)


def test_a_later_attempt_does_not_change_when_the_first_token_came() -> None:
    lifecycle = decoding()
    lifecycle.requeue()
    lifecycle.num_failures += 1
    lifecycle.ask(P, D, 10.0)
    lifecycle.granted(grant(num_cached_tokens=3), (), 11.0)
    *_, end = lifecycle.first_token(first(2, "stop", attempt=2), 12.0)
    assert isinstance(end, Emit)
    assert isinstance(end.event, Finished)
    line = end.event.timeline
    assert (line.ttft_s, line.queue_s, line.num_cached_tokens, line.num_attempts) == (4.0, 1.0, 1, 2)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_each_token_goes_out_once_and_in_order_whoever_tells_it_first(order: tuple[int, ...]) -> None:
    """The PROMPT worker's report and two of the COMPLETION worker's, in any order that leaves no gap, some twice."""
    lifecycle = prefilling()
    reports = [
        lambda: lifecycle.first_token(first(), 3.0),
        lambda: lifecycle.tokens(tokens(0, 2, since_last_kv_s=0.1), 3.0),
        lambda: lifecycle.tokens(tokens(0, 2, since_last_kv_s=0.1), 3.0),
    ]
    commands = [command for which in order for command in reports[which]()]
    commands += lifecycle.tokens(tokens(2, 4), 4.0)
    commands += lifecycle.tokens(tokens(3, 5, "length"), 5.0)
    assert sent(commands) == [100, 101, 102, 103, 104]
    positions = [c.event.position for c in commands if isinstance(c, Emit) and isinstance(c.event, TokensSent)]
    assert positions == sorted(set(positions))
    assert isinstance(commands[-1], Emit)
    assert isinstance(commands[-1].event, Finished)
    assert lifecycle.phase is Phase.ENDED


def test_a_gap_is_seen() -> None:
    lifecycle = decoding()
    assert lifecycle.is_gap(tokens(3, 4))
    assert not lifecycle.is_gap(tokens(2, 3))
    assert not lifecycle.is_gap(tokens(0, 3))


def test_a_request_that_ends_at_its_first_token_releases_the_grant() -> None:
    """The PROMPT worker has KV on its way, so the COMPLETION worker must wait for its last word."""
    lifecycle = prefilling()
    commands = lifecycle.first_token(first(reason="stop"), 3.0)
    assert sent(commands) == [100]
    assert cancels(commands) == [(D, True)]
    assert isinstance(commands[-1], Emit)
    assert isinstance(commands[-1].event, Finished)
    assert commands[-1].event.reason == "stop"


def test_a_late_first_token_of_a_request_handed_back_still_counts() -> None:
    """The COMPLETION worker gave up faster than the PROMPT worker's report came."""
    lifecycle = prefilling()
    lifecycle.requeue()
    assert sent(lifecycle.first_token(first(), 3.0)) == [100]
    assert lifecycle.phase is Phase.QUEUED
    assert lifecycle.token_ids == (5, 6, 7, 100)


def test_a_new_attempt_continues_after_the_known_tokens() -> None:
    lifecycle = decoding()
    lifecycle.requeue()
    (ask,) = lifecycle.ask(P, D, 9.0)
    assert isinstance(ask, Send)
    assert isinstance(ask.message, GrantRequest)
    assert (ask.message.attempt, ask.message.num_output_tokens) == (2, 2)
    assert ask.message.token_ids == (5, 6, 7, 100, 101)
    assert ask.message.arrival_order == 8, "it keeps its age"
    (prefill,) = lifecycle.granted(grant(), (), 9.5)
    assert isinstance(prefill, Send)
    assert isinstance(prefill.message, Prefill)
    assert (prefill.message.num_output_tokens, prefill.message.token_ids) == (2, (5, 6, 7, 100, 101))
    assert lifecycle.num_tokens == 5


PHASES = {
    "queued": (new, []),
    "granting": (granting, [(D, False)]),
    "prefilling": (prefilling, [(P, False), (D, True)]),
    "first token known, KV maybe still on its way": (lambda: decoding(False), [(P, False), (D, True)]),
    "decoding": (decoding, [(D, False)]),
}


@pytest.mark.parametrize("phase", PHASES)
def test_a_client_that_leaves_stops_exactly_those_who_work(phase: str) -> None:
    """Cancel goes to both sides while KV may be on its way; nobody is told of an end."""
    make, expected = PHASES[phase]
    lifecycle = make()
    commands = lifecycle.cancel()
    assert cancels(commands) == expected
    assert len(commands) == len(expected)
    assert lifecycle.phase is Phase.ENDED
    assert lifecycle.holders() == []


@pytest.mark.parametrize("phase", ["first token known, KV maybe still on its way", "decoding"])
def test_a_reader_that_has_enough_stops_them_as_well_and_gets_the_timeline(phase: str) -> None:
    """A stop string is found by the router: the stages are those of any other end, and add up."""
    make, expected = PHASES[phase]
    lifecycle = make()
    *stops, end = lifecycle.finish(9.0)
    assert cancels(stops) == expected
    assert isinstance(end, Emit)
    assert isinstance(end.event, Finished)
    assert end.event.reason == "stop"
    assert end.event.timeline.ttft_s == 4.0
    assert (end.event.timeline.end_s, end.event.timeline.num_cached_tokens) == (9.0, 1)
    assert lifecycle.phase is Phase.ENDED


@pytest.mark.parametrize(
    ("phase", "lost", "expected"),
    [
        ("granting", D, []),
        ("granting", P, [(D, False)]),
        ("prefilling", D, [(P, False)]),
        ("prefilling", P, [(D, False)]),
        ("first token known, KV maybe still on its way", P, [(D, False)]),
        ("first token known, KV maybe still on its way", D, [(P, False)]),
        ("decoding", D, []),
        ("decoding", P, [(D, False)]),
    ],
)
def test_the_dead_are_told_nothing_and_not_waited_for(
    phase: str, lost: WorkerId, expected: list[tuple[WorkerId, bool]]
) -> None:
    assert cancels(PHASES[phase][0]().stop_workers(lost)) == expected


def test_a_new_attempt_has_a_new_sender_to_wait_for() -> None:
    """What the COMPLETION worker reported in the attempt before says nothing about the KV of this one."""
    lifecycle = decoding()
    lifecycle.requeue()
    lifecycle.ask(P, D, 9.0)
    lifecycle.granted(grant(), (), 9.5)
    assert lifecycle.depends_on(P)
    assert cancels(lifecycle.cancel()) == [(P, False), (D, True)]


@pytest.mark.parametrize(
    ("phase", "holders", "on_p", "on_d"),
    [
        ("queued", [], False, False),
        ("granting", [D], False, True),
        ("prefilling", [P, D], True, True),
        ("first token known, KV maybe still on its way", [D], True, True),
        ("decoding", [D], False, True),
    ],
)
def test_who_holds_it_and_whose_death_ends_it(phase: str, holders: list[WorkerId], on_p: bool, on_d: bool) -> None:
    lifecycle = PHASES[phase][0]()
    assert lifecycle.holders() == holders
    assert (lifecycle.depends_on(P), lifecycle.depends_on(D)) == (on_p, on_d)
    assert not lifecycle.depends_on(WorkerId("prompt-0", "another life"))


def test_a_request_ends_once() -> None:
    lifecycle = new()
    too_late = GenerationFailed("timeout", "too late")
    assert lifecycle.fail(too_late) == [Emit("r", too_late)]
    with pytest.raises(AssertionError, match="ends once"):
        lifecycle.fail(too_late)
