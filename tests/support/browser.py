"""A headless Chromium, driven by the DevTools protocol: as much of it as the tests of the page need."""

import asyncio
import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # the tests may run as root, and open nothing but our own page
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-port=0",
)
KEYS = {"Enter": ("Enter", 13, "\r"), "Tab": ("Tab", 9, ""), "Escape": ("Escape", 27, "")}
SHIFT = 8
WAIT_S = 30.0


def find_browser() -> str:
    """Return the browser's path; without one the test is skipped, but not in CI."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        hint = "no Chromium is installed; hint: make browser"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(hint)
    return found


class Page:
    """One tab. What went wrong in it and what it asked for is kept: `errors` and `urls`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._loop = loop
        self._socket = socket
        self._num_sent = 0
        self.errors: list[str] = []
        self.urls: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command; return its result. What happened meanwhile is noted."""
        self._num_sent += 1
        number = self._num_sent
        command = {"id": number, "method": method, "params": parameters}
        return self._loop.run_until_complete(asyncio.wait_for(self._ask(command), WAIT_S))

    async def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        await self._socket.send_str(json.dumps(command))
        while True:
            message = json.loads(await self._socket.receive_str())
            if message.get("id") == command["id"]:
                assert "error" not in message, message["error"]
                return message["result"]
            self._note(message.get("method"), message.get("params"))

    def _note(self, method: str | None, event: Any) -> None:
        match method:
            case "Runtime.exceptionThrown":
                self.errors.append(event["exceptionDetails"]["text"])
            case "Runtime.consoleAPICalled" if event["type"] in ("error", "assert"):
                self.errors.append(str(event["args"]))
            case "Log.entryAdded" if event["entry"]["level"] == "error":
                self.errors.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.urls.append(event["request"]["url"])
            case _:
                pass

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, expression: str, timeout_s: float = WAIT_S) -> None:
        """Wait until the expression is true, as JavaScript understands it."""
        deadline_s = time.monotonic() + timeout_s
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline_s, f"never true: {expression}; errors: {self.errors}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        name, code, text = KEYS[key]
        parameters = {"key": name, "code": name, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **parameters)
        self.call("Input.dispatchKeyEvent", type="keyUp", **parameters)

    def look(self, width: int, height: int, is_dark: bool) -> None:
        """Choose the window's size and the colours that the reader prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))


@contextmanager
def chromium_page() -> Iterator[Page]:
    """Start a browser with a profile of its own; yield its tab."""
    program = find_browser()
    with tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        command = [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            with asyncio.Runner() as runner:
                yield from _connected(runner, _port(Path(folder), process))
        finally:
            process.terminate()
            process.wait(20)


def _connected(runner: asyncio.Runner, port: int) -> Iterator[Page]:
    async def connect() -> tuple[aiohttp.ClientSession, aiohttp.ClientWebSocketResponse]:
        session = aiohttp.ClientSession()
        async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
            tab = next(entry for entry in await response.json() if entry["type"] == "page")
        return session, await session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0)

    session, socket = runner.run(connect())
    try:
        yield Page(runner.get_loop(), socket)
    finally:
        runner.run(socket.close())
        runner.run(session.close())


def _port(folder: Path, process: subprocess.Popen[bytes]) -> int:
    """Return where the browser listens, once it has said so in its profile."""
    return int(_first(lambda: _read(folder / "DevToolsActivePort"), process).split()[0])


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _first(value_of: Callable[[], str], process: subprocess.Popen[bytes]) -> str:
    deadline_s = time.monotonic() + WAIT_S
    while not (value := value_of()):
        assert process.poll() is None, "the browser ended at once"
        assert time.monotonic() < deadline_s, "the browser does not listen"
        time.sleep(0.05)
    return value
