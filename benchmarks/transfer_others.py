"""The ends of two transfer libraries for transfer.py, over TCP and where they are installed: one-sided writes.

The receiver takes no part: bytes appear in memory that it has registered, and nothing is checked or copied on.
"""

import base64
import os
import time
from collections.abc import Sequence

from transfer_ends import Bare
from transfer_prompt import Prompt

POLL_S = 50e-6
DONE = b"done"


def place_of(end: Bare) -> int:
    return end.memory.__array_interface__["data"][0]


def split(address: str) -> tuple[str, int]:
    """Return what names the peer, and where its memory begins."""
    name, _, place = address.removeprefix("tcp:").rpartition("@")
    return name, int(place)


def nixl_agent_named(name: str) -> "object":
    os.environ.setdefault("UCX_TLS", "tcp")  # before UCX looks
    from nixl._api import nixl_agent, nixl_agent_config

    return nixl_agent(name, nixl_agent_config(backends=["UCX"]))


class NixlReceiveEnd(Bare):
    def __init__(self, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.agent = nixl_agent_named("receiver")
        self.agent.register_memory([(place_of(self), prompt.num_bytes, 0, "")], "DRAM")
        metadata = base64.b64encode(self.agent.get_agent_metadata()).decode()
        self.addresses: Sequence[str] = [f"tcp:{metadata}@{place_of(self)}"]

    def move(self, frame_bytes: int) -> None:
        while not any(DONE in messages for messages in self.agent.get_new_notifs().values()):
            time.sleep(POLL_S)


class NixlSendEnd(Bare):
    def __init__(self, prompt: Prompt, address: str) -> None:
        super().__init__(prompt)
        metadata, self.target = split(address)
        self.agent = nixl_agent_named("sender")
        self.agent.register_memory([(place_of(self), prompt.num_bytes, 0, "")], "DRAM")
        self.peer = self.agent.add_remote_agent(base64.b64decode(metadata))

    def expect(self, frame_bytes: int) -> None:
        here, there = (
            self.agent.get_xfer_descs([(base + at, size, 0) for at, size in self.prompt.places(frame_bytes)], "DRAM")
            for base in (place_of(self), self.target)
        )
        self.write = self.agent.initialize_xfer("WRITE", here, there, self.peer, DONE)

    def move(self, frame_bytes: int) -> None:
        state = self.agent.transfer(self.write)
        while state == "PROC":
            time.sleep(POLL_S)
            state = self.agent.check_xfer_state(self.write)
        assert state == "DONE", state
        self.agent.release_xfer_handle(self.write)


class MooncakeEnd(Bare):
    """Either end; the receiver's does nothing once it is registered."""

    def __init__(self, prompt: Prompt, address: str = "") -> None:
        super().__init__(prompt)
        from mooncake.engine import TransferEngine

        self.engine = TransferEngine()
        assert self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
        assert self.engine.register_memory(place_of(self), prompt.num_bytes) == 0
        self.addresses: Sequence[str] = [f"tcp:127.0.0.1:{self.engine.get_rpc_port()}@{place_of(self)}"]
        self.target = split(address) if address else None

    def move(self, frame_bytes: int) -> None:
        if self.target is None:
            return
        places = self.prompt.places(frame_bytes)
        peer, base = self.target
        here, there = [place_of(self) + at for at, _ in places], [base + at for at, _ in places]
        assert self.engine.batch_transfer_sync_write(peer, here, there, [size for _, size in places]) == 0
