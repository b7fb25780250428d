"""What a cluster opens, and to whom: by default to this machine only, and never an address that a client names."""

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from listening import listening
from live_cluster import LiveCluster, wait_until

FAKE = {"engine": {"kind": "fake", "num_blocks": 64}}
REMEDY = r"hint: .*`twinpool keys FOLDER`, then --keys FOLDER"


@pytest.fixture(scope="module")
def cluster(tiny_llama: Path) -> Iterator[LiveCluster]:
    with LiveCluster(tiny_llama, {"prompt": FAKE, "completion": FAKE}) as cluster:
        yield cluster


def test_by_default_everything_listens_on_loopback(cluster: LiveCluster) -> None:
    """Every TCP socket of every process, as the kernel lists them."""
    found = {name: listening(process.pid) for name, process in cluster.processes.items()}
    assert {host for sockets in found.values() for host, _ in sockets} == {"127.0.0.1"}
    assert {name: len(sockets) for name, sockets in found.items()} == {"router": 1, "prompt-0": 0, "completion-0": 1}


def test_the_list_of_sockets_sees_one_that_is_open_to_all() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        assert ("00000000", server.getsockname()[1]) in listening(os.getpid())


@pytest.mark.parametrize(
    ("module", "flags", "router", "message"),
    [
        ("router", ["--control", "tcp://0.0.0.0:5599"], {}, rf"--control tcp://0\.0\.0\.0:5599 is not .*\n{REMEDY}"),
        ("router", ["--control", "tcp://*:5599"], {}, rf"--control tcp://\*:5599 is not a loopback .*\n{REMEDY}"),
        ("router", [], {"host": "0.0.0.0"}, r"router\.host '0\.0\.0\.0' is not loopback\nhint: .* API keys"),
        ("prefill_worker", ["--control", "tcp://10.9.8.7:5599"], {}, rf"is on another machine\n{REMEDY}"),
        ("decode_worker", ["--control", "tcp://10.9.8.7:5599"], {}, rf"is on another machine\n{REMEDY}"),
        (
            "decode_worker",
            ["--data-host", "0.0.0.0", "--advertise", "tcp://10.9.8.7:5"],
            {},
            rf"--data-host 0\.0\.0\.0 is not loopback\n{REMEDY}",
        ),
        ("decode_worker", ["--data-host", "0.0.0.0"], {}, r"no address that others can be told\nhint: --advertise"),
    ],
)
def test_nothing_listens_or_connects_beyond_loopback_without_keys(
    tmp_path: Path, tiny_llama: Path, module: str, flags: list[str], router: dict[str, Any], message: str
) -> None:
    """The process ends with exit code 2 before it opens anything, and says what to do."""
    (tmp_path / "spec.json").write_text(json.dumps({"prompt": FAKE, "completion": FAKE, "router": router}))
    command = [sys.executable, "-m", f"twinpool.{module}", "--spec", str(tmp_path / "spec.json")]
    control = [] if "--control" in flags else ["--control", f"ipc://{tmp_path}/control"]
    command += ["--model-folder", str(tiny_llama), *control, *flags]
    environment = {key: value for key, value in os.environ.items() if key != "TWINPOOL_API_KEYS"}
    folder = ["--run-folder", str(tmp_path)]
    done = subprocess.run(
        [*command, *folder], env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2, done.stderr
    assert re.search(message, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_no_address_that_a_client_names_is_ever_connected_to(cluster: LiveCluster) -> None:
    """Fields and headers in which other systems look for peers, URLs and rooms; in headers line breaks, too."""
    with socket.create_server(("127.0.0.1", 0)) as trap:
        port = trap.getsockname()[1]
        address = f"127.0.0.1:{port}"
        url = f"http://{address}/x"
        for body in bodies_that_name(address, url, port):
            for route, start in (("completions", {"prompt": "a"}), ("chat/completions", {"messages": MESSAGES})):
                full = {"model": cluster.model, "max_tokens": 2, **start, **body}
                status = cluster.client.post(f"/v1/{route}", json=full).status_code
                assert status in (200, 400, 404), (status, body)
        for request_id in headers_that_name(address, url):
            headers = {"x-request-id": request_id, "x-kv-address": url, "x-forwarded-host": address}
            body = {"model": cluster.model, "prompt": "a", "max_tokens": 2}
            answer = cluster.client.post("/v1/completions", json=body, headers=headers)
            assert answer.status_code == 200
            assert re.fullmatch(r"[0-9a-f]{24}", answer.headers["x-request-id"]), "it is echoed"
        for line in ("x-request-id: a\r\nx-evil: b", f"x-request-id: a\x00{address}", f"x-request-id: a\rb: {url}"):
            assert b"x-evil" not in send_head(cluster, line)
        trap.settimeout(1.0)
        with pytest.raises(TimeoutError):
            trap.accept()
    wait_until(lambda: cluster.status()["running"] == 0, 20, "nothing runs on")


MESSAGES = [{"role": "user", "content": "a"}]


def bodies_that_name(address: str, url: str, port: int) -> list[dict[str, Any]]:
    peer = {"remote_host": "127.0.0.1", "remote_port": port, "do_remote_prefill": True, "remote_engine_id": address}
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    names = ("bootstrap_host", "decode_address", "prefill_url", "remote_addr", "data_addresses", "receiver_addresses")
    return [
        {"kv_transfer_params": peer},
        {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": 2**63},
        {"bootstrap_room": -1, "request_id": f"___decode_addr_{address}", "transfer_id": url, "attempt": 0},
        *({name: value} for name in names for value in (url, f"tcp://{address}", [f"tcp://{address}"])),
        {"receiver": f"completion-0/{address}\r\nx: y", "generation": 1, "credit_bytes": 2**63},
        {"user": url, "metadata": {"callback": url}, "webhook": url, "store": False},
        {"messages": image},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": url}}]}]},
        {"chat_template": "{% include '" + url + "' %}"},
        {"model": url},
        {"model": f"../../{address}"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": url}}}},
        {"tools": [{"type": "mcp", "server_url": url}]},
    ]


def headers_that_name(address: str, url: str) -> list[str]:
    return [url, f"___prefill_addr_{address}___decode_addr_{address}_x", f"tcp://{address}", f"a {address}", "x" * 200]


def send_head(cluster: LiveCluster, line: str) -> bytes:
    """Send a request with this header line as it is; return the whole answer."""
    port = int(cluster.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=20) as client:
        client.sendall(f"GET /health/live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{line}\r\n\r\n".encode())
        answer = b""
        while piece := client.recv(65536):
            answer += piece
    return answer
