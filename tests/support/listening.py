"""Which TCP addresses a process listens on, and what it holds, from /proc."""

import os
import re
from pathlib import Path

LISTEN = "0A"


def listening(pid: int) -> set[tuple[str, int]]:
    """Return (host, port) of every TCP socket that `pid` listens on; hosts as 127.0.0.1 or in the kernel's hex."""
    links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()]
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    found: set[tuple[str, int]] = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.add(("127.0.0.1" if address == "0100007F" else address, int(port, 16)))
    return found


def resident_bytes(pid: int) -> int:
    return int(re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) * 1024


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))
