"""A live cluster with keys whose control and data links run over TCP, as they would between machines."""

from pathlib import Path
from typing import Any

from live_cluster import LiveCluster, free_port
from twinpool.cluster.protocol.keys import make_keys

HOLDERS = ("router", "prompt", "completion-0", "completion-1")


class ClosedCluster(LiveCluster):
    def __init__(self, model_folder: Path, spec: dict[str, Any]) -> None:
        super().__init__(model_folder, spec)
        self.keys = self.folder / "keys"
        make_keys(self.keys, HOLDERS)
        self.keys_of: dict[str, Path] = {}  # where a process looks for its keys, if not there
        self.control_port = free_port()
        self.data_ports = {name: free_port() for name in self.names if name.startswith("completion")}

    def arguments(self, name: str) -> list[str]:
        arguments = super().arguments(name)
        arguments[arguments.index("--control") + 1] = f"tcp://127.0.0.1:{self.control_port}"
        arguments += ["--keys", str(self.keys_of.get(name, self.keys))]
        if name in self.data_ports:
            port = str(self.data_ports[name])
            arguments += ["--data-port", port, "--advertise", f"tcp://127.0.0.1:{port}"]
        return arguments
