"""Which announced frames are received when: order, limits, failures; and any sequence of events."""

from collections import defaultdict
from typing import cast

import pytest
from hypothesis import given, settings, strategies as st
from twinpool.kvtransfer.frames import Announce, Cancelled, Received
from twinpool.kvtransfer.staging import Build, Deliver, Drop, Post, Staging, StagingCommand, StagingLimits

A, B, C = b"a", b"b", b"c"
LIMITS = StagingLimits(
    max_communicators=2, max_frame_bytes=100, max_staged_bytes=250, wait_s=5.0, build_s=10.0, idle_s=60.0
)


def announced(sequence: int, num_bytes: int = 100, peer: bytes = A) -> Received:
    frame = Announce(
        request_id="r",
        attempt=1,
        generation=3,
        layout=1,
        sequence=sequence,
        layer_start=0,
        layer_end=1,
        token_start=0,
        token_end=1,
        num_bytes=num_bytes,
        checksum=0,
    )
    return Received(peer, frame, memoryview(b""), False)


def other(number: int, payload: bytes = b"", peer: bytes = A) -> Received:
    return Received(peer, Cancelled(request_id=f"c{number}", attempt=1, generation=3), memoryview(payload), False)


def frame_of(received: Received) -> Announce:
    return cast(Announce, received.message)


def delivered(commands: list[StagingCommand]) -> list[Received]:
    return [command.received for command in commands if isinstance(command, Deliver)]


def payload(num_bytes: int = 100) -> memoryview:
    return memoryview(bytes(num_bytes))


def test_the_first_announced_frame_gets_its_peer_a_communicator() -> None:
    staging = Staging(LIMITS)
    first, second = announced(0), announced(1)
    assert staging.arrived(first, 0.0) == [Build(1, A), Post(1, A, frame_of(first))]
    assert staging.arrived(second, 0.0) == [Post(1, A, frame_of(second))]


def test_a_message_without_bytes_to_wait_for_goes_on_at_once() -> None:
    staging = Staging(LIMITS)
    assert staging.arrived(other(1), 0.0) == [Deliver(other(1))]
    with_payload = other(2, b"inline")
    assert staging.arrived(with_payload, 0.0) == [Deliver(with_payload)]
    assert staging.num_communicators == 0


def test_what_lies_behind_a_frame_waits_for_it() -> None:
    staging = Staging(LIMITS)
    staging.arrived(announced(0), 0.0)
    assert staging.arrived(other(1), 0.0) == []
    went_on = delivered(staging.landed(1, payload(), True, 0.1))
    assert [type(received.message) for received in went_on] == [Announce, Cancelled]
    assert went_on[0].payload.nbytes == 100
    assert went_on[0].is_intact


def test_another_peer_does_not_wait() -> None:
    staging = Staging(LIMITS)
    staging.arrived(announced(0), 0.0)
    assert staging.arrived(other(1, peer=B), 0.0) == [Deliver(other(1, peer=B))]


def test_so_many_frames_are_posted_ahead_and_no_more() -> None:
    staging = Staging(LIMITS)
    for sequence in range(4):
        commands = staging.arrived(announced(sequence, 10), 0.0)
        assert any(isinstance(command, Post) for command in commands) == (sequence < 2)
    third = next(command for command in staging.landed(1, payload(10), True, 0.1) if isinstance(command, Post))
    assert third.frame.sequence == 2


def test_bytes_that_nobody_took_leave_no_room() -> None:
    """Two frames of 100 are here; a third would be 300 of 250. It is posted when one was taken."""
    staging = Staging(LIMITS)
    for sequence in range(3):
        staging.arrived(announced(sequence), 0.0)
    posted = [*staging.landed(1, payload(), True, 0.1), *staging.landed(1, payload(), True, 0.2)]
    assert not any(isinstance(command, Post) for command in posted)
    assert not staging.is_full
    assert [type(command) for command in staging.taken(100, 0.3)] == [Post]


def test_inline_bytes_fill_it() -> None:
    staging = Staging(LIMITS)
    staging.arrived(other(1, bytes(250)), 0.0)
    assert staging.is_full
    staging.taken(250, 0.1)
    assert not staging.is_full


def test_frames_that_are_only_posted_do_not_fill_it() -> None:
    """Regression: messages were not read any more, among them those that a new communicator needs to connect."""
    staging = Staging(LIMITS)
    staging.arrived(announced(0), 0.0)
    staging.arrived(announced(0, 100, B), 0.0)
    assert not staging.is_full


def test_too_many_messages_that_cannot_go_on_fill_it() -> None:
    staging = Staging(StagingLimits(2, 100, 250, 5.0, 10.0, 60.0, max_entries=3))
    for sequence in range(3):
        assert not staging.is_full
        staging.arrived(announced(sequence), 0.0)
    assert staging.is_full


def test_a_frame_that_is_too_large_goes_on_without_its_bytes() -> None:
    staging = Staging(LIMITS)
    giant = announced(0, 101)
    assert staging.arrived(giant, 0.0) == [Deliver(giant)]


@pytest.mark.parametrize("how", ["broken", "late", "never built"])
def test_a_communicator_that_fails_owes_nobody_anything(how: str) -> None:
    """All that was announced goes on without bytes, in order; the next frame gets its peer a new communicator."""
    staging = Staging(LIMITS)
    messages = [announced(0), other(1), announced(2), announced(3)]
    for message in messages:
        staging.arrived(message, 0.0)
    if how == "broken":
        commands = staging.broken(1, "it is", 1.0)
    elif how == "late":
        staging.posted(1, 1.0)
        assert staging.tick(5.9) == []
        commands = staging.tick(6.1)
    else:
        assert staging.tick(9.9) == []
        commands = staging.tick(10.1)
    assert [type(command) for command in commands] == [Drop, Deliver, Deliver, Deliver, Deliver]
    assert delivered(commands) == messages
    assert staging.landed(1, payload(), True, 11.0) == [], "its late report counts for nothing"
    assert staging.arrived(announced(4), 11.0) == [Build(2, A), Post(2, A, frame_of(announced(4)))]


def test_an_unused_communicator_is_given_up() -> None:
    staging = Staging(LIMITS)
    staging.arrived(announced(0), 0.0)
    staging.landed(1, payload(), True, 1.0)
    assert staging.deadline() == 61.0
    assert staging.tick(60.9) == []
    assert staging.tick(61.0) == [Drop(1, A, "unused for 60 s")]
    assert staging.deadline() is None


def test_who_is_out_of_use_for_longest_makes_place() -> None:
    staging = Staging(LIMITS)
    for number, peer in enumerate((A, B)):
        staging.arrived(announced(0, 10, peer), 0.0)
        staging.landed(number + 1, payload(10), True, 2.0 - number)
        staging.taken(10, 2.0)
    commands = staging.arrived(announced(0, 10, C), 3.0)
    assert commands[:2] == [Drop(2, B, "another peer needs its place"), Build(3, C)]


def test_with_every_place_in_use_a_frame_waits_and_not_for_ever() -> None:
    staging = Staging(LIMITS)
    for peer in (A, B):
        staging.arrived(announced(0, 10, peer), 0.0)
    waiting = announced(0, 10, C)
    assert staging.arrived(waiting, 0.0) == []
    assert staging.landed(1, payload(10), True, 1.0)[-2:] == [Build(3, C), Post(3, C, frame_of(waiting))]

    staging = Staging(LIMITS)
    for peer in (A, B, C):
        staging.arrived(announced(0, 10, peer), 0.0)
    assert delivered(staging.tick(5.0)) == [waiting]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_sequence_of_events(data: st.DataObject) -> None:
    """Every message goes on exactly once and in its peer's order, within the limits, and at rest nothing is left."""
    staging = Staging(LIMITS)
    now, sent, came = 0.0, defaultdict[bytes, list[str]](list), defaultdict[bytes, list[str]](list)
    posted: dict[int, list[Announce]] = defaultdict(list)
    untaken: list[int] = []

    def note(commands: list[StagingCommand]) -> None:
        for command in commands:
            match command:
                case Deliver():
                    came[command.received.peer].append(name_of(command.received))
                    untaken.append(command.received.payload.nbytes)
                case Post():
                    posted[command.communicator].append(command.frame)
                case Drop():
                    posted.pop(command.communicator, None)
                case Build():
                    assert command.communicator not in posted
        staging.check()

    def name_of(received: Received) -> str:
        message = received.message
        return f"{message.sequence}" if isinstance(message, Announce) else cast(Cancelled, message).request_id

    for number in range(data.draw(st.integers(0, 40))):
        now += data.draw(st.sampled_from([0.0, 0.1, 3.0]))
        event = data.draw(st.sampled_from(["frame", "frame", "other", "land", "land", "take", "break", "tick"]))
        if event in ("frame", "other"):
            peer = data.draw(st.sampled_from([A, B, C]))
            size = data.draw(st.sampled_from([1, 60, 100, 101]))
            received = announced(number, size, peer) if event == "frame" else other(number, bytes(size % 7), peer)
            sent[peer].append(name_of(received))
            note(staging.arrived(received, now))
        elif event == "land" and any(posted.values()):
            communicator = data.draw(st.sampled_from([key for key, frames in posted.items() if frames]))
            note(staging.posted(communicator, now))
            note(staging.landed(communicator, payload(posted[communicator].pop(0).num_bytes), True, now))
        elif event == "break" and posted:
            note(staging.broken(data.draw(st.sampled_from(list(posted))), "it is", now))
        elif event == "take" and untaken:
            note(staging.taken(untaken.pop(), now))
        elif event == "tick":
            note(staging.tick(now))
    for _ in range(100):
        now += 10
        while untaken:
            note(staging.taken(untaken.pop(), now))
        note(staging.tick(now))
    assert came == sent
    assert staging.num_communicators == 0
    assert staging.deadline() is None
