"""A LiveCluster whose links pass through frame proxies, so that a test can break them.

`data["completion-0"]`: the KV that this worker receives (`to_target`) and its answers (`from_target`).
`control["prompt-0"]`: what this worker tells the router (`to_target`) and what it is told (`from_target`).
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import zmtp
from frame_proxy import FrameProxy
from live_cluster import LiveCluster, free_port
from twinpool.cluster.protocol.codec import FROM_ROUTER, FROM_WORKER, decode
from twinpool.cluster.protocol.messages import Message
from twinpool.kvtransfer.frames import FROM_RECEIVER, FROM_SENDER, DataMessage, decode_header


class ProxiedCluster(LiveCluster):
    def __init__(self, model_folder: Path, spec: dict[str, Any], seed: int = 0) -> None:
        super().__init__(model_folder, spec)
        workers = self.names[1:]
        self._control_port = free_port()
        self._data_ports = {name: free_port() for name in workers if name.startswith("completion")}
        self.data = {name: FrameProxy(port, seed + i) for i, (name, port) in enumerate(self._data_ports.items())}
        self.control = {name: FrameProxy(self._control_port, seed + 100 + i) for i, name in enumerate(workers)}

    @property
    def proxies(self) -> list[FrameProxy]:
        return [*self.data.values(), *self.control.values()]

    def control_address(self, name: str) -> str:
        return f"tcp://127.0.0.1:{self._control_port}" if name == "router" else self.control[name].address

    def arguments(self, name: str) -> list[str]:
        if name not in self.data:
            return super().arguments(name)
        through = ["--data-port", str(self._data_ports[name]), "--advertise", self.data[name].address]
        return [*super().arguments(name), *through]

    def counts(self, proxies: Iterable[FrameProxy]) -> Counter[str]:
        """Return what `proxies` did, in both directions together."""
        return sum((direction.counts for proxy in proxies for direction in proxy.directions), Counter[str]())

    def close(self) -> dict[str, int]:
        for proxy in self.proxies:
            proxy.release()  # a process that says goodbye is heard
        codes = super().close()
        for proxy in self.proxies:
            proxy.close()
        return codes


def read_data(message: zmtp.Message) -> DataMessage:
    """Return what passes on a data link, in either direction."""
    return decode_header(message.frames[0], {**FROM_SENDER, **FROM_RECEIVER})


def read_control(message: zmtp.Message) -> Message:
    """Return what passes on a control link, in either direction."""
    return decode(list(message.frames), {**FROM_WORKER, **FROM_ROUTER})


def is_kv(message: zmtp.Message) -> bool:
    """True for frames of keys and values: of the messages on a data link, only they have a payload."""
    return len(message.frames) == 2 and bool(message.frames[1])
