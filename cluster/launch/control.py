"""The launcher's control socket: one line of JSON in, one line of JSON out, over a unix socket in a private folder.

`status`, `scale` and `down` use it, so that they need no Ray and answer at once.
"""

import contextlib
import json
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from ..protocol.errors import LaunchError, TwinpoolError

MAX_LINE_BYTES = 1 << 22
Handler = Callable[[dict[str, Any]], Any]
logger = logging.getLogger(__name__)


class _Connection(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        handlers = cast("_Server", self.server).handlers
        answer = _answer(handlers, self.rfile.readline(MAX_LINE_BYTES))
        with contextlib.suppress(BrokenPipeError):  # whoever asked did not wait
            self.wfile.write(json.dumps(answer).encode() + b"\n")


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        self.handlers = handlers
        super().__init__(str(path), _Connection)


class ControlServer:
    """Answers requests in threads of its own until closed."""

    def __init__(self, path: Path, handlers: Mapping[str, Handler]) -> None:
        self._server = _Server(path, handlers)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="control", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def ask(path: Path, request: str, timeout_s: float, arguments: dict[str, Any] | None = None) -> Any:
    """Send one request to a launcher and return its answer. Raises LaunchError, the launcher's own included."""
    line = json.dumps({**(arguments or {}), "request": request}).encode() + b"\n"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            connection.sendall(line)
            with connection.makefile("rb") as lines:
                answer = json.loads(lines.readline(MAX_LINE_BYTES) or b"null")
    except TimeoutError as error:
        raise LaunchError(f"the launcher did not answer `{request}` within {timeout_s:g} s") from error
    except (OSError, ValueError) as error:
        raise LaunchError(f"the launcher cannot be reached: {error}") from error
    if answer is None:
        raise LaunchError(f"the launcher ended before it answered `{request}`")
    if "error" in answer:
        raise LaunchError(answer["error"], hint=answer.get("hint"))
    return answer["result"]


def _answer(handlers: Mapping[str, Handler], line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
        handler = handlers[request.pop("request")]
    except (ValueError, KeyError, AttributeError):
        return {"error": f"not a request; known are {', '.join(handlers)}"}
    try:
        return {"result": handler(request)}
    except TwinpoolError as error:
        return {"error": error.message, "hint": error.hint}
    except Exception as error:  # whatever went wrong, whoever asked gets an answer
        logger.exception("control request failed")
        return {"error": f"the launcher failed on this request: {error}"}
