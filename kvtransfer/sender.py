"""The sending side of transfers to one peer. Pure: events in, one command at a time out, the clock an argument.

A transfer's life here:
1. `open` with the grant: generation, credits, and for each layer the first token that the receiver does not have.
2. `layer_written` for every layer of every chunk, in the order of the computation.
3. `finish` with the first output token, once the last chunk is done.
4. `next_command` yields SendFrame while credits last (short prompts join layers), then SendDone.
5. The transfer ends in exactly one Closed: acked, cancelled or failed. After it, nothing reads the blocks any more.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..cluster.protocol.messages import PrefillStages, SampledToken
from .frames import Cancelled, DataMessage, Done, Reject, extend_digest
from .layout import KVLayout

Key = tuple[str, int]
Outcome = Literal["acked", "cancelled", "failed"]


@dataclass(frozen=True)
class SenderLimits:
    max_frame_bytes: int
    min_frame_bytes: int
    lease_s: float


@dataclass(frozen=True)
class FirstOutput:
    """What travels in Done."""

    position: int
    token: SampledToken
    stages: PrefillStages


@dataclass(frozen=True)
class SendFrame:
    """Gather these rows, checksum and send them, then call `frame_sent`."""

    key: Key
    generation: int
    sequence: int
    layers: range
    tokens: range


@dataclass(frozen=True)
class SendMessage:
    message: DataMessage


@dataclass(frozen=True)
class Closed:
    key: Key
    outcome: Outcome
    reason: str


SenderCommand = SendFrame | SendMessage | Closed


@dataclass
class Piece:
    """Tokens of consecutive layers that are written and not yet sent."""

    layer_start: int
    layer_end: int
    token_start: int
    token_end: int


@dataclass
class OutgoingTransfer:
    key: Key
    generation: int
    credit_bytes: int
    first_tokens: Sequence[int]
    expires_at: float | None = None  # set while we wait for the peer
    pieces: deque[Piece] = field(default_factory=deque[Piece])
    num_sent_bytes: int = 0
    num_arrived_bytes: int = 0
    num_frames: int = 0
    digest: int = 0
    first_output: FirstOutput | None = None
    is_done_sent: bool = False
    cancel_reason: str | None = None
    is_request_finished: bool = False


class Sender:
    def __init__(self, layout: KVLayout, limits: SenderLimits) -> None:
        self._layout = layout
        self._limits = limits
        self._transfers: dict[Key, OutgoingTransfer] = {}
        self._closed: deque[Closed] = deque()

    def __len__(self) -> int:
        return len(self._transfers)

    def open(
        self, key: Key, generation: int, credit_bytes: int, first_token: int, arrived_tokens: Sequence[int] = ()
    ) -> None:
        """`first_token`: the first that the receiver does not have; `arrived_tokens`: the same for each layer apart."""
        assert key not in self._transfers, f"transfer {key} is open already"
        first_tokens = [max(first_token, arrived) for arrived in arrived_tokens] or [
            first_token for _ in range(self._layout.num_layers)
        ]
        self._transfers[key] = OutgoingTransfer(key, generation, credit_bytes, first_tokens)

    def layer_written(self, key: Key, layer: int, tokens: range) -> None:
        """Layer `layer` has keys and values for `tokens`; what the receiver already has is skipped."""
        transfer = self._transfers.get(key)
        start = max(tokens.start, transfer.first_tokens[layer]) if transfer else tokens.stop
        if transfer is None or start >= tokens.stop:
            return
        last = transfer.pieces[-1] if transfer.pieces else None
        if last and (last.layer_end, last.token_start, last.token_end) == (layer, start, tokens.stop):
            last.layer_end += 1
        else:
            transfer.pieces.append(Piece(layer, layer + 1, start, tokens.stop))

    def finish(self, key: Key, first_output: FirstOutput) -> None:
        transfer = self._transfers.get(key)
        if transfer is not None:
            transfer.first_output = first_output

    def abort(self, key: Key, reason: str, is_finished: bool = False) -> None:
        """Stop sending; the peer is told with Cancelled, then the transfer closes. An unknown key is fine.

        `is_finished`: the request has ended, so the peer must not take this for a failure.
        """
        transfer = self._transfers.get(key)
        if transfer is not None:
            transfer.cancel_reason, transfer.is_request_finished = reason, is_finished

    def num_arrived_bytes(self, key: Key) -> int:
        transfer = self._transfers.get(key)
        return transfer.num_arrived_bytes if transfer else 0

    def num_sent_bytes(self, key: Key) -> int:
        transfer = self._transfers.get(key)
        return transfer.num_sent_bytes if transfer else 0

    def credited(self, key: Key, generation: int, num_bytes: int, now: float) -> None:
        transfer = self._current(key, generation)
        if transfer is not None:
            transfer.num_arrived_bytes = min(transfer.num_sent_bytes, transfer.num_arrived_bytes + num_bytes)
            transfer.expires_at = now + self._limits.lease_s if transfer.is_done_sent else None

    def acked(self, key: Key, generation: int) -> None:
        transfer = self._current(key, generation)
        if transfer is not None and transfer.is_done_sent:
            self._close(transfer, "acked", "")

    def rejected(self, message: Reject) -> None:
        if self._current(message.key, message.generation) is not None:
            self.abort(message.key, f"the receiver refused: {message.reason}")

    def peer_gone(self) -> None:
        """The peer's process is dead: every transfer to it has failed, nobody needs to be told."""
        for transfer in list(self._transfers.values()):
            self._close(transfer, "failed", "the COMPLETION worker is gone")

    def frame_sent(self, key: Key, num_bytes: int, frame_checksum: int) -> None:
        transfer = self._transfers[key]
        transfer.num_sent_bytes += num_bytes
        transfer.num_frames += 1
        transfer.digest = extend_digest(transfer.digest, frame_checksum)

    def next_command(self, now: float) -> SenderCommand | None:
        """Return what to do next, or None when everything waits for events, credits or `deadline`."""
        for transfer in list(self._transfers.values()):
            command = self._next_of(transfer, now)
            if command is not None:
                self._transfers[transfer.key] = self._transfers.pop(transfer.key)  # others first, next time
                return self._finish_cancel(transfer, command)
        return self._closed.popleft() if self._closed else None

    def deadline(self) -> float | None:
        """When the next wait for the peer runs out."""
        return min((t.expires_at for t in self._transfers.values() if t.expires_at is not None), default=None)

    def is_bounded(self) -> bool:
        """True when no transfer waits for its peer without a deadline (I6); call it when `next_command` said None."""
        blocked = [t for t in self._transfers.values() if t.pieces and not self._should_wait_for_more(t, t.pieces[0])]
        unanswered = [t for t in self._transfers.values() if t.is_done_sent]
        return all(transfer.expires_at is not None for transfer in [*blocked, *unanswered])

    def _next_of(self, transfer: OutgoingTransfer, now: float) -> SenderCommand | None:
        if transfer.cancel_reason is None and transfer.expires_at is not None and now >= transfer.expires_at:
            transfer.cancel_reason = f"the receiver was silent for {self._limits.lease_s:g} s"
        if transfer.cancel_reason is not None:
            return SendMessage(_cancelled(transfer))
        frame = self._next_frame(transfer, now)
        if frame is not None:
            return frame
        if transfer.first_output and not transfer.pieces and not transfer.is_done_sent:
            return self._done(transfer, transfer.first_output, now)
        return None

    def _next_frame(self, transfer: OutgoingTransfer, now: float) -> SendFrame | None:
        if not transfer.pieces:
            return None
        piece = transfer.pieces[0]
        if self._should_wait_for_more(transfer, piece):
            return None
        layers, tokens = self._fit(piece)
        num_bytes = self._layout.frame_bytes(len(layers), len(tokens))
        in_flight = transfer.num_sent_bytes - transfer.num_arrived_bytes
        if in_flight and in_flight + num_bytes > transfer.credit_bytes:
            transfer.expires_at = transfer.expires_at or now + self._limits.lease_s
            return None
        self._cut(transfer, piece, layers, tokens)
        return SendFrame(transfer.key, transfer.generation, transfer.num_frames, layers, tokens)

    def _should_wait_for_more(self, transfer: OutgoingTransfer, piece: Piece) -> bool:
        """A small piece waits for the layers above it, as long as they are still being computed."""
        num_bytes = self._layout.frame_bytes(piece.layer_end - piece.layer_start, piece.token_end - piece.token_start)
        is_growing = len(transfer.pieces) == 1 and piece.layer_end < self._layout.num_layers
        return is_growing and num_bytes < self._limits.min_frame_bytes

    def _fit(self, piece: Piece) -> tuple[range, range]:
        """Return the part of `piece` that goes into one frame: whole layers if one fits, else a part of one layer."""
        num_tokens = piece.token_end - piece.token_start
        layer_bytes = self._layout.frame_bytes(1, num_tokens)
        num_layers = self._limits.max_frame_bytes // layer_bytes
        if num_layers >= 1:
            layer_end = min(piece.layer_end, piece.layer_start + num_layers)
            return range(piece.layer_start, layer_end), range(piece.token_start, piece.token_end)
        most = max(1, self._limits.max_frame_bytes // self._layout.frame_bytes(1, 1))
        end = min(piece.token_end, piece.token_start + most)
        return range(piece.layer_start, piece.layer_start + 1), range(piece.token_start, end)

    @staticmethod
    def _cut(transfer: OutgoingTransfer, piece: Piece, layers: range, tokens: range) -> None:
        transfer.pieces.popleft()
        if layers.stop < piece.layer_end:
            transfer.pieces.appendleft(Piece(layers.stop, piece.layer_end, piece.token_start, piece.token_end))
        if tokens.stop < piece.token_end:
            transfer.pieces.appendleft(Piece(layers.start, layers.stop, tokens.stop, piece.token_end))

    def _done(self, transfer: OutgoingTransfer, output: FirstOutput, now: float) -> SendMessage:
        transfer.is_done_sent = True
        transfer.expires_at = now + self._limits.lease_s
        request_id, attempt = transfer.key
        return SendMessage(
            Done(
                request_id=request_id,
                attempt=attempt,
                generation=transfer.generation,
                num_frames=transfer.num_frames,
                digest=transfer.digest,
                position=output.position,
                token=output.token,
                stages=output.stages,
            )
        )

    def _finish_cancel(self, transfer: OutgoingTransfer, command: SenderCommand) -> SenderCommand:
        if isinstance(command, SendMessage) and isinstance(command.message, Cancelled):
            self._close(transfer, "cancelled", transfer.cancel_reason or "")
        return command

    def _close(self, transfer: OutgoingTransfer, outcome: Outcome, reason: str) -> None:
        del self._transfers[transfer.key]
        self._closed.append(Closed(transfer.key, outcome, reason))

    def _current(self, key: Key, generation: int) -> OutgoingTransfer | None:
        transfer = self._transfers.get(key)
        return transfer if transfer is not None and transfer.generation == generation else None


def _cancelled(transfer: OutgoingTransfer) -> Cancelled:
    return Cancelled(
        request_id=transfer.key[0],
        attempt=transfer.key[1],
        generation=transfer.generation,
        is_finished=transfer.is_request_finished,
    )
