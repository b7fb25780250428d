"""The receiving side of all transfers into one cache. Pure: events in, commands out, the clock an argument.

A transfer's life here:
1. `grant`: blocks are reserved by the caller under `generation`; frames may come.
2. `frame`: identity, layout, order, ranges, length and checksum are checked before Write is returned, so that no byte
   is copied under any generation but the current one (I2). Layers must arrive without gap or overlap.
3. `done`: frame count, digest and coverage are checked; Ack goes back, Complete hands over the first token.
4. Or the sender dies, and another one goes on where it stopped: `adopt` gives what has arrived to a new attempt.
5. Or `cancel`, a failed check, or an expired lease: while a sender may still be sending, the blocks stay reserved until
   its Cancelled arrives, its process is gone, or the lease runs out; then Released. Late frames are counted, dropped.
"""

from dataclasses import dataclass, field

from .frames import Ack, Cancelled, Credit, DataMessage, Done, KVFrame, Reject, extend_digest
from .layout import KVLayout

Key = tuple[str, int]


@dataclass(frozen=True)
class Write:
    """Copy the payload of the frame just checked into the cache."""

    key: Key
    generation: int
    layers: range
    tokens: range


@dataclass(frozen=True)
class Reply:
    """Send to the peer whose message was just handled."""

    message: DataMessage


@dataclass(frozen=True)
class Complete:
    """All keys and values are here and verified; decoding may start."""

    key: Key
    done: Done


@dataclass(frozen=True)
class TransferFailed:
    """The transfer will not complete; its blocks follow with Released."""

    key: Key
    reason: str


@dataclass(frozen=True)
class Released:
    """Nobody can send into these blocks any more."""

    key: Key


ReceiverCommand = Write | Reply | Complete | TransferFailed | Released


@dataclass
class IncomingTransfer:
    key: Key
    generation: int
    first_token: int
    num_tokens: int
    expires_at: float
    next_token: list[int] = field(default_factory=list[int])  # per layer: how far keys and values have arrived
    num_frames: int = 0
    digest: int = 0
    is_cancelling: bool = False  # only waits for the sender to say that it stopped, no longer than for its next frame


class Receiver:
    def __init__(self, layout: KVLayout, lease_s: float) -> None:
        self._layout = layout
        self._lease_s = lease_s
        self._transfers: dict[Key, IncomingTransfer] = {}
        self.num_dropped_frames = 0

    def __len__(self) -> int:
        return len(self._transfers)

    def keys(self) -> list[Key]:
        return list(self._transfers)

    def is_open(self, key: Key) -> bool:
        """True while frames of `key` are wanted."""
        transfer = self._transfers.get(key)
        return transfer is not None and not transfer.is_cancelling

    def grant(self, key: Key, generation: int, tokens: range, now: float) -> None:
        """Expect keys and values of `tokens` in every layer."""
        assert key not in self._transfers, f"transfer {key} is granted already"
        next_token = [tokens.start] * self._layout.num_layers
        self._transfers[key] = IncomingTransfer(
            key, generation, tokens.start, tokens.stop, now + self._lease_s, next_token
        )

    def adopt(self, heir: Key, key: Key, generation: int, num_tokens: int, now: float) -> tuple[int, ...]:
        """The sender of `key` is dead: `heir` expects what is missing up to `num_tokens`, under a new generation.

        Returns, for each layer, the first token that is missing. Whatever still comes for `key` is late.
        """
        arrived = self._transfers.pop(key)
        assert not arrived.is_cancelling and arrived.num_tokens <= num_tokens, "nothing to go on from"
        self.grant(heir, generation, range(arrived.first_token, num_tokens), now)
        self._transfers[heir].next_token = arrived.next_token
        return tuple(arrived.next_token)

    def renew(self, key: Key, now: float) -> None:
        transfer = self._transfers.get(key)
        if transfer is not None and not transfer.is_cancelling:
            transfer.expires_at = max(transfer.expires_at, now + self._lease_s)

    def frame(self, frame: KVFrame, num_bytes: int, is_intact: bool, now: float) -> list[ReceiverCommand]:
        """`num_bytes` is the payload's true length, `is_intact` whether its checksum agreed."""
        transfer = self._current(frame)
        if transfer is None or transfer.is_cancelling or frame.sequence < transfer.num_frames:
            self.num_dropped_frames += 1
            return [] if transfer is not None else [self._reject(frame, "unknown transfer or old generation")]
        problem = self._problem(transfer, frame, num_bytes, is_intact)
        if problem is not None:
            self.num_dropped_frames += 1
            return self._fail(transfer, frame, problem)
        for layer in range(frame.layer_start, frame.layer_end):
            transfer.next_token[layer] = frame.token_end
        transfer.num_frames += 1
        transfer.digest = extend_digest(transfer.digest, frame.checksum)
        transfer.expires_at = max(transfer.expires_at, now + self._lease_s)
        layers, tokens = range(frame.layer_start, frame.layer_end), range(frame.token_start, frame.token_end)
        credit = Credit(
            request_id=frame.request_id, attempt=frame.attempt, generation=frame.generation, num_bytes=num_bytes
        )
        return [Write(frame.key, frame.generation, layers, tokens), Reply(credit)]

    def done(self, done: Done) -> list[ReceiverCommand]:
        transfer = self._current(done)
        if transfer is None or transfer.is_cancelling:
            return [] if transfer is not None else [self._reject(done, "unknown transfer or old generation")]
        missing = sum(transfer.num_tokens - token for token in transfer.next_token)
        if missing or done.num_frames != transfer.num_frames or done.digest != transfer.digest:
            problem = f"{transfer.num_frames} of {done.num_frames} frames came, {missing} rows are missing"
            return self._fail(transfer, done, problem)
        del self._transfers[done.key]
        ack = Ack(request_id=done.request_id, attempt=done.attempt, generation=done.generation)
        return [Reply(ack), Complete(done.key, done)]

    def cancelled(self, message: Cancelled) -> list[ReceiverCommand]:
        """The sender stopped. If nobody had asked it to, and the request is not finished, the transfer failed."""
        transfer = self._current(message)
        if transfer is None:
            return []
        is_expected = transfer.is_cancelling or message.is_finished
        return self._release(transfer, None if is_expected else "the PROMPT worker stopped sending")

    def cancel(self, key: Key, sender_is_active: bool) -> list[ReceiverCommand]:
        """The router gave the transfer up. An unknown key is fine."""
        transfer = self._transfers.get(key)
        if transfer is None:
            return []
        if not sender_is_active:
            return self._release(transfer, None)
        transfer.is_cancelling = True
        return []

    def expire(self, now: float) -> list[ReceiverCommand]:
        """Give up every transfer whose lease ran out."""
        commands: list[ReceiverCommand] = []
        for transfer in [t for t in self._transfers.values() if now >= t.expires_at]:
            reason = None if transfer.is_cancelling else f"no KV and no renewal for {self._lease_s:g} s"
            commands += self._release(transfer, reason)
        return commands

    def deadline(self) -> float | None:
        return min((t.expires_at for t in self._transfers.values()), default=None)

    def _problem(self, transfer: IncomingTransfer, frame: KVFrame, num_bytes: int, is_intact: bool) -> str | None:
        if frame.layout != self._layout.fingerprint:
            return f"KV layout {frame.layout:016x} is not this cache's {self._layout.fingerprint:016x}"
        if frame.sequence != transfer.num_frames:
            return f"frame {frame.sequence} came where {transfer.num_frames} was due"
        if not (0 <= frame.layer_start < frame.layer_end <= self._layout.num_layers):
            return f"layers {frame.layer_start} to {frame.layer_end} of {self._layout.num_layers}"
        if not (frame.token_start < frame.token_end <= transfer.num_tokens):
            return f"tokens {frame.token_start} to {frame.token_end} of {transfer.num_tokens}"
        if any(transfer.next_token[i] != frame.token_start for i in range(frame.layer_start, frame.layer_end)):
            return f"tokens from {frame.token_start} leave a gap or overlap"
        due = self._layout.frame_bytes(frame.layer_end - frame.layer_start, frame.token_end - frame.token_start)
        if num_bytes != due or frame.num_bytes != due:
            return f"{num_bytes} bytes came where {due} were due"
        return None if is_intact else "the checksum is wrong"

    def _fail(self, transfer: IncomingTransfer, message: DataMessage, reason: str) -> list[ReceiverCommand]:
        transfer.is_cancelling = True
        return [self._reject(message, reason), TransferFailed(transfer.key, reason)]

    def _release(self, transfer: IncomingTransfer, failure: str | None) -> list[ReceiverCommand]:
        del self._transfers[transfer.key]
        failed: list[ReceiverCommand] = [] if failure is None else [TransferFailed(transfer.key, failure)]
        return [*failed, Released(transfer.key)]

    def _current(self, message: DataMessage) -> IncomingTransfer | None:
        transfer = self._transfers.get(message.key)
        return transfer if transfer is not None and transfer.generation == message.generation else None

    @staticmethod
    def _reject(message: DataMessage, reason: str) -> Reply:
        return Reply(
            Reject(request_id=message.request_id, attempt=message.attempt, generation=message.generation, reason=reason)
        )
