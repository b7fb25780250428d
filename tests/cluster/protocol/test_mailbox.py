"""Objects from other threads to a loop that waits in a poll."""

import os
import select
import threading
from typing import Any

import pytest
from twinpool.cluster.protocol.mailbox import Mailbox


def is_readable(mailbox: Mailbox[Any], timeout_s: float = 0.0) -> bool:
    return bool(select.select([mailbox.fileno()], [], [], timeout_s)[0])


def test_it_is_readable_exactly_while_something_is_there() -> None:
    mailbox: Mailbox[int] = Mailbox()
    assert not is_readable(mailbox)
    assert mailbox.drain() == []
    mailbox.put(1)
    mailbox.put(2)
    assert is_readable(mailbox)
    assert mailbox.drain() == [1, 2]
    assert not is_readable(mailbox)
    assert mailbox.drain() == []
    mailbox.put(3)
    assert mailbox.drain() == [3]
    mailbox.close()


def test_closing_gives_the_descriptor_back() -> None:
    mailbox: Mailbox[int] = Mailbox()
    number = mailbox.fileno()
    os.fstat(number)
    mailbox.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


def test_nothing_is_lost_or_reordered_between_threads() -> None:
    """Four writers, one polling reader: each writer's objects come complete and in its order."""
    mailbox: Mailbox[tuple[int, int]] = Mailbox()
    number = 2000

    def write(writer: int) -> None:
        for i in range(number):
            mailbox.put((writer, i))

    writers = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in writers:
        thread.start()
    received: list[tuple[int, int]] = []
    while len(received) < 4 * number:
        assert is_readable(mailbox, 10.0), "the reader was not woken"
        received += mailbox.drain()
    for thread in writers:
        thread.join()
    for writer in range(4):
        assert [i for n, i in received if n == writer] == list(range(number))
    mailbox.close()
