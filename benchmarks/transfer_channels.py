"""The ends of our own channels for transfer.py: what the workers do to move KV, without their engines."""

import queue
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
import xxhash
import zmq
from transfer_prompt import BLOCK_SIZE, LEASE_S, Prompt, frame_limits
from twinpool.cluster.config import LivenessSpec, TransferSpec, Transport
from twinpool.cluster.protocol.messages import PrefillStages, SampledToken
from twinpool.engine.kv_cache import KVCache
from twinpool.kvtransfer.channel import SenderThread
from twinpool.kvtransfer.credits import HeldCredits
from twinpool.kvtransfer.frames import Credit, Done, KVFrame, Received
from twinpool.kvtransfer.open_channel import ChannelOpener
from twinpool.kvtransfer.receiver import Complete, Key, Receiver, ReceiverCommand, Reply, Write
from twinpool.kvtransfer.sender import Closed, FirstOutput
from twinpool.kvtransfer.zmq_channel import ZmqReceiver, ZmqSender

MAX_FRAMES_A_TURN = 16  # as the COMPLETION worker
STAGES = PrefillStages(queue_s=0, prefill_s=0, num_computed_tokens=0, num_kv_bytes=0, num_kv_bytes_arrived=0)
Context = zmq.Context[zmq.Socket[bytes]]


def opener(transport: Transport) -> ChannelOpener:
    """Return what opens a worker's channels; both ends are to use the same."""

    def on_stuck(reason: str) -> None:
        raise SystemExit(reason)

    return ChannelOpener(TransferSpec(transport=transport), LivenessSpec(lease_s=LEASE_S), "cpu", on_stuck)


class Ours:
    """What both ends of our channel share: a KV cache, and the blocks of the one prompt in it."""

    addresses: Sequence[str] = ()

    def __init__(self, prompt: Prompt, seed: int) -> None:
        torch.set_num_threads(1)
        self.prompt = prompt
        self.num_moves = 0
        self.table = prompt.block_table(seed)
        self.cache = KVCache(prompt.layout, len(self.table), BLOCK_SIZE, torch.device("cpu"))

    def next_key(self) -> Key:
        self.num_moves += 1
        return (f"move-{self.num_moves}", 1)

    def clear(self) -> None:
        for layer in self.cache.layers:
            layer.zero_()

    def fill(self) -> None:
        """Write other bytes into every row."""
        draws = torch.Generator().manual_seed(5)
        for layer in self.cache.layers:
            flat = layer.view(torch.uint8)
            flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=draws))

    def digest(self) -> int:
        """Return a hash of the prompt's keys and values in logical order."""
        hashed = xxhash.xxh3_64()
        for layer in range(self.prompt.layout.num_layers):
            hashed.update(self.cache.gather(self.table, range(layer, layer + 1), range(self.prompt.num_tokens)))
        return hashed.intdigest()


class OurSendEnd(Ours):
    """A PROMPT worker without its engine: the sender thread gathers from the cache, all layers are there at once."""

    def __init__(self, prompt: Prompt, transport: Transport, addresses: Sequence[str]) -> None:
        super().__init__(prompt, seed=1)
        self.opener = opener(transport)
        self.peer = addresses
        self.context = Context()
        self.closed: queue.SimpleQueue[Closed] = queue.SimpleQueue()
        self.threads: dict[int, SenderThread] = {}
        self.fill()

    def expect(self, frame_bytes: int) -> None:
        """Connect, once for each size of frames."""
        if frame_bytes not in self.threads:
            self.threads[frame_bytes] = SenderThread(
                partial(
                    self.opener.open_sender,
                    partial(ZmqSender, self.context, self.peer, TransferSpec().max_frame_bytes, LEASE_S),
                    self.peer,
                    "the receiver",
                ),
                self.prompt.layout,
                frame_limits(frame_bytes),
                self.cache.gather,
                self.closed.put,
                f"{frame_bytes}",
            )

    def move(self, frame_bytes: int) -> None:
        thread, key = self.threads[frame_bytes], self.next_key()
        thread.open(key, 1, TransferSpec().credit_bytes, 0, self.table)
        for layer in range(self.prompt.layout.num_layers):
            thread.layer_written(key, layer, range(self.prompt.num_tokens))
        thread.finish(key, FirstOutput(0, SampledToken(token=7), STAGES))
        closed = self.closed.get()
        assert closed == Closed(key, "acked", ""), closed


class OurReceiveEnd(Ours):
    """A COMPLETION worker without its engine: every frame is checked, scattered into the cache, and credited."""

    def __init__(self, prompt: Prompt, transport: Transport, path: Path) -> None:
        super().__init__(prompt, seed=2)
        self.channel = opener(transport).open_receiver(
            partial(ZmqReceiver, Context(), path, TransferSpec().max_frame_bytes)
        )
        self.addresses = self.channel.addresses
        self.core = Receiver(prompt.layout, LEASE_S)
        self.credits = HeldCredits()

    def expect(self, frame_bytes: int) -> None:
        self.core.grant(self.next_key(), 1, range(self.prompt.num_tokens), time.monotonic())

    def move(self, frame_bytes: int) -> None:
        while len(self.core):
            zmq.zmq_poll([(source, zmq.POLLIN) for source in self.channel.sources], 1000)
            for _ in range(MAX_FRAMES_A_TURN):
                received = self.channel.receive()
                if received is None:
                    break
                for command in self._handle(received):
                    self._execute(command, received)
            for peer, credit in self.credits.take():
                self.channel.reply(peer, credit)
            assert not self.core.expire(time.monotonic()), "nothing came in time"

    def _handle(self, received: Received) -> list[ReceiverCommand]:
        now = time.monotonic()
        if isinstance(received.message, KVFrame):
            return self.core.frame(received.message, received.payload.nbytes, received.is_intact, now)
        assert isinstance(received.message, Done), received.message
        return self.core.done(received.message, now)

    def _execute(self, command: ReceiverCommand, received: Received) -> None:
        match command:
            case Write():
                self.cache.scatter(self.table, command.layers, command.tokens, received.payload)
            case Reply(Credit() as credit):
                due = self.credits.add(received.peer, credit)
                if due is not None:
                    self.channel.reply(received.peer, due)
            case Reply():
                self.channel.reply(received.peer, command.message)
            case Complete():
                pass  # the core has forgotten it: the move is over
            case _:
                raise AssertionError(command)
