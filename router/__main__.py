"""`python -m twinpool.router`: the front door, one process: HTTP for clients, a control socket for workers.

SIGTERM or SIGINT drains: nothing new is taken, what runs may finish within `router.drain_s`, and what does not is ended
in words. A second signal ends the process at once.
"""

import asyncio
import gc
import logging
import os
import signal
from pathlib import Path

import uvloop

from ..cluster.config import ClusterSpec
from ..cluster.role import RoleArguments, parse_role_arguments, run_role
from .app import Door, create_admin_app, create_app
from .auth import keys_for
from .drain import Drain
from .generation import GenerationFailed
from .http_server import CUT_S, Server, make_server
from .openai.tokenizer import ChatSettings, ChatTokenizer
from .service import RouterService
from .tracing import connect_traces

MAX_YOUNG_OBJECTS = 10_000  # before a collection; a request makes some hundred, and few of them in circles

log = logging.getLogger(__name__)

CUT_OFF = GenerationFailed("draining", "The router is shutting down, and this request did not finish in time.")


def main() -> int:
    arguments = parse_role_arguments("router")
    return uvloop.run(serve(arguments))


async def serve(arguments: RoleArguments) -> int:
    """Serve until SIGTERM or SIGINT, and drain; return the exit code."""
    spec = arguments.spec
    keys = keys_for(spec.router, os.environ)
    tokenizer = ChatTokenizer.load(arguments.model_folder, _chat_settings(spec))
    service = RouterService(spec, arguments.control[0], arguments.keys)
    door = Door(keys, read_limit_s=spec.router.request_read_s)
    traces = connect_traces(spec.router.otlp_endpoint) if spec.router.otlp_endpoint is not None else None
    app = create_app(service, tokenizer, spec.model_name, spec.router.keep_alive_s, door, traces)
    servers = [make_server(app, spec.router, host=spec.router.host, port=spec.router.port)]
    if arguments.admin_socket is not None:
        servers.append(make_server(create_admin_app(service), spec.router, uds=str(arguments.admin_socket)))
    shutdown = Shutdown(servers, service, door.drain, spec.router.drain_s)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, shutdown.ask)
    gc.freeze()  # what is loaded stays: no collection needs to look through it again
    gc.set_threshold(MAX_YOUNG_OBJECTS)
    service.start()
    service.on_failure(shutdown.at_once)
    try:
        await asyncio.gather(*(server.serve() for server in servers))
    finally:
        await service.stop()
        if traces is not None:
            traces.close()
    return 0 if service.failure is None else 1


class Shutdown:
    """Ends the servers: politely when asked once, at once when asked again."""

    def __init__(self, servers: list[Server], service: RouterService, drain: Drain, limit_s: float) -> None:
        self._servers = servers
        self._service = service
        self._drain = drain
        self._limit_s = limit_s
        self._leaving: asyncio.Task[None] | None = None

    def ask(self) -> None:
        if self._leaving is None:
            self._leaving = asyncio.create_task(self._leave())
        else:
            log.info("asked to end a second time: ends at once")
            self.at_once()

    def at_once(self) -> None:
        for server in self._servers:
            server.force_exit = True
            server.should_exit = True

    async def _leave(self) -> None:
        self._drain.begin()
        log.info("draining: %d requests may finish within %g s", self._drain.num_running, self._limit_s)
        if not await self._drain.is_idle_within(self._limit_s):
            log.warning("%d requests did not finish in time and are ended", self._drain.num_running)
            self._service.end_all(CUT_OFF)
            await self._drain.is_idle_within(CUT_S)
        for server in self._servers:
            server.should_exit = True


def _chat_settings(spec: ClusterSpec) -> ChatSettings:
    template = spec.router.chat_template
    is_fake = "fake" in (spec.prompt.engine.kind, spec.completion.engine.kind)
    tool_format = None if spec.router.tool_format == "auto" else spec.router.tool_format
    return ChatSettings(Path(template) if template is not None else None, tool_format, knows_grammars=not is_fake)


if __name__ == "__main__":
    run_role(main)
