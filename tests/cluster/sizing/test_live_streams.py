"""Streams that are read beside a measurement: their gaps, and what happens when one of them fails."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from twinpool.cluster.protocol.errors import LaunchError
from twinpool.cluster.sizing.live_streams import LiveStreams

TOKEN = 'data: {"choices": [{"token_ids": [5], "text": "a"}]}\n\n'
EMPTY = 'data: {"choices": [{"token_ids": [], "text": ""}]}\n\n'


def answering(text: str, status: int = 200) -> LiveStreams:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, text=text))

    @contextmanager
    def open_stream() -> Iterator[httpx.Response]:
        with httpx.Client(transport=transport) as client, client.stream("GET", "http://router/") as response:
            yield response

    return LiveStreams(2, open_stream)


def test_gaps_lie_between_tokens_of_one_answer() -> None:
    """An answer of three tokens has two gaps; answers without a second token have none. A stream begins anew."""
    with answering(TOKEN + EMPTY + TOKEN * 2 + "data: [DONE]\n\n") as streams:
        gaps_s = streams.gaps_s(40)
    assert len(gaps_s) >= 40
    assert all(gap_s >= 0 for gap_s in gaps_s)


@pytest.mark.parametrize(
    ("text", "status", "reason"),
    [
        (TOKEN + 'data: {"error": {"message": "the workers are gone"}}\n\n', 200, "the workers are gone"),
        ('{"error": {"message": "queue full"}}', 503, "queue full"),
    ],
)
def test_a_failing_stream_is_told_to_who_asks_for_gaps(text: str, status: int, reason: str) -> None:
    with answering(text, status) as streams, pytest.raises(LaunchError, match=reason):
        streams.gaps_s(1)
