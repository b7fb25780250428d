"""What was announced is given out by its name, once, and what the receiver skipped is dropped."""

from twinpool.kvtransfer.frames import Announce, Go
from twinpool.kvtransfer.outbox import Outbox


def announced(sequence: int, generation: int = 3) -> Announce:
    return Announce(
        request_id="r",
        attempt=1,
        generation=generation,
        layout=1,
        sequence=sequence,
        layer_start=0,
        layer_end=1,
        token_start=0,
        token_end=1,
        num_bytes=10,
        checksum=0,
    )


def go(sequence: int, generation: int = 3) -> Go:
    return Go(request_id="r", attempt=1, generation=generation, communicator=1, sequence=sequence)


def filled(num_frames: int) -> Outbox:
    outbox = Outbox(max_bytes=40)
    for sequence in range(num_frames):
        outbox.announce(announced(sequence), memoryview(bytes([sequence]) * 10))
    return outbox


def test_each_is_given_out_once() -> None:
    outbox = filled(2)
    assert [outbox.go(go(sequence)) for sequence in (0, 1)] == [b"\0" * 10, b"\1" * 10]
    assert outbox.go(go(1)) is None
    assert outbox.num_bytes == 0


def test_what_was_announced_before_is_dropped() -> None:
    outbox = filled(3)
    assert outbox.go(go(1)) == b"\1" * 10
    assert outbox.num_bytes == 10
    assert outbox.go(go(0)) is None


def test_another_generation_is_another_frame() -> None:
    outbox = filled(1)
    assert outbox.go(go(0, generation=4)) is None
    assert outbox.num_bytes == 10, "and asking for it drops nothing"


def test_it_has_room_up_to_its_bound_and_always_for_one() -> None:
    assert filled(3).has_room(10)
    assert not filled(3).has_room(11)
    assert filled(0).has_room(1000)
