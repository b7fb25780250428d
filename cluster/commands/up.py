"""`twinpool up`: builds the spec, starts a launcher, shows the way to ready, and stays or leaves it running."""

import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..client_key import KEY_VARIABLE
from ..config import ClusterSpec, load_spec, parse_spec
from ..launch.events import Event
from ..launch.start import StartedLauncher, UpOptions, await_ready, start_launcher
from ..protocol.errors import ConfigError, LaunchError

STOP_MARGIN_S = 30.0  # beyond drain and grace: the router's own end, Ray's, and the sweep


@dataclass(frozen=True)
class SpecFlags:
    """What the command line may change in a spec."""

    prompt_workers: int | None = None
    completion_workers: int | None = None
    model: str | None = None
    port: int | None = None
    name: str | None = None
    keys: Path | None = None


def build_spec(file: Path | None, flags: SpecFlags) -> ClusterSpec:
    """Read the spec file, or take the defaults, and lay the flags over it. Raises ConfigError."""
    data: dict[str, Any] = (load_spec(file) if file else parse_spec({}, "the defaults")).model_dump()
    for section, key, value in (
        (data["prompt"], "num_workers", flags.prompt_workers),
        (data["completion"], "num_workers", flags.completion_workers),
        (data["router"], "port", flags.port),
        (data, "model", flags.model),
        (data, "name", flags.name),
        (data["security"], "keys_folder", None if flags.keys is None else str(flags.keys)),
    ):
        if value is not None:
            section[key] = value
    spec = parse_spec(data, str(file or "the command line"))
    for pool in ("prompt", "completion"):
        if getattr(spec, pool).num_workers < 1:
            raise ConfigError(
                f"{pool}.num_workers is 0, but a request needs a worker of each pool", hint=f"--{pool}-workers 1"
            )
    return spec


class Progress:
    """Shows events as lines: what started, what is ready, after how many seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = time.monotonic()

    def __call__(self, event: Event) -> None:
        elapsed = f"[dim]{time.monotonic() - self._started_s:5.1f} s[/dim]"
        if event.kind == "ray":
            what = "embedded Ray started" if event.state == "local" else f"joined Ray at {escape(event.state)}"
            self._console.print(f"{elapsed}  {what}", highlight=False)
        elif event.kind == "process" and not event.logs:
            color = {"ready": "green", "failed": "red", "restarting": "yellow"}.get(event.state, "default")
            self._console.print(f"{elapsed}  {event.name:<14} [{color}]{event.state}[/{color}]", highlight=False)
        for name, lines in event.logs.items():
            self._console.print(f"[bold]last lines of {name}[/bold] ({event.state}):", highlight=False)
            for line in lines or ["(its log is empty)"]:
                self._console.print(f"  {line}", markup=False, highlight=False)


def run_up(options: UpOptions, console: Console, as_json: bool) -> None:
    """Bring a cluster up; in the foreground, stay until Ctrl-C or SIGTERM and end it. Raises LaunchError."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    started_s = time.monotonic()
    try:
        launcher = start_launcher(options)
        try:
            await_ready(launcher, options, Progress(console))
            _print_ready(launcher, console, as_json, time.monotonic() - started_s)
            if not options.is_detached:
                _stay(launcher, console)
        except KeyboardInterrupt:
            drain_s = options.spec.router.drain_s
            console.print(f"stopping; running requests may finish within {drain_s:g} s, Ctrl-C again ends them …")
            stop_launcher(launcher, options)
            console.print("stopped; nothing is left running")
        except BaseException:
            stop_launcher(launcher, options)
            raise
        finally:
            launcher.release()
    finally:
        signal.signal(signal.SIGTERM, previous)


def stop_launcher(launcher: StartedLauncher, options: UpOptions) -> None:
    """End a launcher of ours; Ctrl-C again does not interrupt the end, but ends running requests at once."""

    def hurry(*_: object) -> None:
        launcher.hurry()

    previous = {number: signal.signal(number, hurry) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        launcher.stop(options.spec.router.drain_s + options.stop_grace_s + STOP_MARGIN_S)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def endpoint_of(spec: ClusterSpec) -> str:
    return spec.router.url


def _stay(launcher: StartedLauncher, console: Console) -> None:
    console.print("[dim]Ctrl-C stops the cluster.[/dim]")
    for event in launcher.follow():
        if event.kind == "failed":
            raise LaunchError(event.message, hint=event.hint)
    code = launcher.process.wait()
    if code != 0:
        raise LaunchError("the launcher died, and with it the cluster", hint=f"its logs are in {launcher.folder.logs}")
    console.print("the cluster was stopped")


def _print_ready(launcher: StartedLauncher, console: Console, as_json: bool, elapsed_s: float) -> None:
    spec = launcher.spec
    endpoint = endpoint_of(spec)
    if as_json:
        ready = {"name": spec.name, "endpoint": endpoint, "model": spec.model_name, "ready_in_s": round(elapsed_s, 2)}
        more = {"launcher_pid": launcher.process.pid, "logs": str(launcher.folder.logs)}
        Console().print_json(json.dumps({**ready, **more}))
        return
    body = {"model": spec.model_name, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}
    console.print(f"\n[green]ready[/green] in {elapsed_s:.1f} s", highlight=False)
    console.print(
        f"  endpoint  {endpoint}/v1\n  model     {escape(spec.model_name)}\n", highlight=False, soft_wrap=True
    )
    key = f' -H "authorization: Bearer ${KEY_VARIABLE}"' if spec.router.api_keys_file is not None else ""
    curl = f"curl {endpoint}/v1/chat/completions -H 'content-type: application/json'{key} -d '{json.dumps(body)}'"
    console.print(curl, markup=False, highlight=False, soft_wrap=True)
    console.print()
