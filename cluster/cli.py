"""The `twinpool` command: declares every command and its help, and turns our errors into one clear message.

Exit codes: 0 done, 1 it could not be done, 2 wrong usage or a wrong spec, 130 interrupted. What the commands do is in
cluster/commands.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .. import __version__
from .commands import (
    calibrate,
    change,
    chat,
    demo,
    doctor,
    explain,
    find,
    keys,
    plan,
    simulate,
    status,
    timeline,
    up,
    validate,
)
from .commands.output import print_json, text_console
from .config import DEFAULT_MODEL
from .launch.roles import Programs
from .launch.start import UpOptions
from .protocol.errors import ConfigError, TwinpoolError

HELP = f"""Serve a language model from two pools of workers: PROMPT workers prefill, COMPLETION workers decode.

    \b
    twinpool up            start a cluster here, with {DEFAULT_MODEL}
    twinpool chat "Hi!"    ask it something
    twinpool status        see every process
    twinpool doctor        see what is wrong
    twinpool down          end it
"""

Name = Annotated[str | None, typer.Option(help="Which cluster; not needed while only one runs.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
PromptWorkers = Annotated[int | None, typer.Option(min=1, help="Size of the PROMPT pool (prefill).")]
CompletionWorkers = Annotated[int | None, typer.Option(min=1, help="Size of the COMPLETION pool (decode).")]
Model = Annotated[str | None, typer.Option(help=f"{DEFAULT_MODEL}, a local Hugging Face folder, or a hub id.")]
Timeout = Annotated[
    float, typer.Option(min=1.0, help="Seconds the cluster has to become ready, once the model is here.")
]
Grace = Annotated[float, typer.Option("--timeout", min=0.0, help="Seconds the processes have to end before SIGKILL.")]


def main() -> None:
    """Run the command line; exits with its code."""
    sys.exit(run(build_app(Programs())))


def run(app: typer.Typer) -> int:
    """Run an app on this process's arguments and return the exit code; an error becomes one message."""
    try:
        app()
    except SystemExit as ended:  # the usual end of an app, good or bad
        return ended.code if isinstance(ended.code, int) else 1
    except TwinpoolError as error:
        _print_error(str(error))
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return 130
    except Exception as error:  # a bug of ours; even then nobody is shown a traceback who did not ask for one
        if os.environ.get("TWINPOOL_TRACEBACK"):
            raise
        _print_error(
            f"unexpected {type(error).__name__}: {error}\nhint: TWINPOOL_TRACEBACK=1 shows where; please report"
        )
        return 1
    return 0


def build_app(programs: Programs) -> typer.Typer:
    """Return the command line; `programs` are the modules that the launcher starts as roles."""
    app = typer.Typer(
        help=HELP, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
    )
    app.callback()(_root)
    _add_start(app, programs)
    for command in (_status, _logs, _scale, _down, _chat):
        app.command(command.__name__.removeprefix("_"))(command)
    app.command("doctor")(doctor.doctor_command)
    app.command("keys")(keys.keys_command)
    app.command("explain")(explain.explain_command)
    app.command("calibrate")(calibrate.calibrate_command)
    app.command("validate")(validate.validate_command)
    app.command("simulate")(simulate.simulate_command)
    app.command("plan")(plan.plan_command)
    return app


def _print_version(asked: bool) -> None:
    if asked:
        text_console().print(f"twinpool {__version__}", highlight=False)
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Say which.")
    ] = False,
) -> None:
    del version  # its callback has done all


def _add_start(app: typer.Typer, programs: Programs) -> None:
    @app.command("up")
    def up_command(  # pyright: ignore[reportUnusedFunction]
        spec: Annotated[Path | None, typer.Argument(help="Cluster spec, YAML or JSON; flags override it.")] = None,
        prompt_workers: PromptWorkers = None,
        completion_workers: CompletionWorkers = None,
        model: Model = None,
        port: Annotated[int | None, typer.Option(min=0, max=65535, help="HTTP port; 0 takes any free one.")] = None,
        address: Annotated[str, typer.Option(help="An existing Ray (HOST:PORT), or local: one of our own.")] = "local",
        name: Annotated[str | None, typer.Option(help="Name of the cluster; several can run side by side.")] = None,
        keys: Annotated[
            Path | None, typer.Option(help="Folder by `twinpool keys`: closes the workers' sockets.")
        ] = None,
        detach: Annotated[bool, typer.Option("--detach", "-d", help="Return once it is ready; it runs on.")] = False,
        timeout: Timeout = 120.0,
        as_json: Json = False,
    ) -> None:
        """Start a cluster and print its endpoint.

        It stays in the foreground, and Ctrl-C ends all of it; with --detach it runs on until `twinpool down`.
        """
        flags = up.SpecFlags(prompt_workers, completion_workers, model, port, name, keys)
        options = UpOptions(up.build_spec(spec, flags), address, detach, timeout, programs=programs)
        up.run_up(options, Console(stderr=as_json), as_json)

    @app.command("demo")
    def demo_command(  # pyright: ignore[reportUnusedFunction]
        prompt_workers: PromptWorkers = None,
        completion_workers: CompletionWorkers = None,
        model: Model = None,
        timeout: Timeout = 300.0,
    ) -> None:
        """Start a cluster of its own, ask it one question, show where the time went, and end it."""
        flags = up.SpecFlags(prompt_workers, completion_workers, model)
        demo.run_demo(demo.demo_options(flags, timeout, programs), text_console())


def _status(name: Name = None, as_json: Json = False) -> None:
    """Show every process of a cluster: state, restarts, last exit, load; and what happened lately.

    Exit code 1 when no cluster runs.
    """
    answer = find.find_cluster(name).status()
    if as_json:
        print_json(answer)
    else:
        status.show_status(answer, text_console())


def _logs(
    process: Annotated[str, typer.Argument(help="router, prompt-0, completion-1, …, or launcher.")],
    name: Name = None,
    tail: Annotated[int, typer.Option(min=0, help="How many of the last lines.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
) -> None:
    """Print the log of one process; those of the last run stay until the next `up`."""
    status.show_logs(process, name, tail, follow, text_console())


def _scale(
    prompt_workers: PromptWorkers = None,
    completion_workers: CompletionWorkers = None,
    name: Name = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, help="Seconds for new workers to be ready, old ones to end.")
    ] = 60.0,
    as_json: Json = False,
) -> None:
    """Change the size of the pools while they serve.

    New workers get the next numbers; the highest numbers leave first, and what ran on them goes on elsewhere.
    """
    sizes = {"prompt": prompt_workers, "completion": completion_workers}
    answer = change.scale(name, {role: size for role, size in sizes.items() if size is not None}, timeout)
    if as_json:
        print_json(answer)
        return
    for verb in ("added", "removed"):
        if answer[verb]:
            text_console().print(f"{verb}: {', '.join(answer[verb])}", highlight=False)
    status.show_status(answer, text_console())


def _down(
    name: Name = None,
    timeout: Grace = 10.0,
    now: Annotated[bool, typer.Option("--now", help="Do not let running requests finish.")] = False,
    as_json: Json = False,
) -> None:
    """End a cluster and everything it started. Does nothing, successfully, when none runs.

    Running requests may finish first, for as long as the spec's router.drain_s says; new ones are refused.
    """
    answer = change.down(name, timeout, now, _ignore if as_json else _show_line)
    if as_json:
        print_json(answer)
        return
    swept = answer["num_leftovers_killed"]
    done = f"{answer['name']} is stopped" if answer["was_running"] else "no cluster was running"
    text_console().print(done + (f"; {swept} left-over processes were ended" if swept else ""), highlight=False)


def _chat(
    prompt: Annotated[str, typer.Argument(help="What to ask; - reads it from standard input.")],
    timing: Annotated[bool, typer.Option("--timing", help="Show where the time went, stage by stage.")] = False,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0, help="0 always takes the likeliest token.")] = 0.0,
    system: Annotated[str | None, typer.Option(help="Instructions that come before the question.")] = None,
    name: Name = None,
    as_json: Json = False,
) -> None:
    """Ask a running cluster something; the answer streams as it is made."""
    state = find.find_cluster(name).state
    text = sys.stdin.read() if prompt == "-" else prompt
    question = chat.Question(text, system, max_tokens, temperature, timing)
    answer = chat.ask_question(state.endpoint, state.model_name, question, _ignore if as_json else _show_piece)
    if as_json:
        print_json({"text": answer.text, "finish_reason": answer.finish_reason, "timing": answer.timing})
        return
    _show_piece("\n")
    if answer.timing:
        _show_piece("\n" + "\n".join(timeline.draw_timeline(answer.timing)) + "\n")


def _print_error(message: str) -> None:
    Console(stderr=True).print(f"error: {message}", style="red", markup=False, highlight=False, soft_wrap=True)


def _show_piece(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def _show_line(line: str) -> None:
    text_console().print(line, markup=False, highlight=False, soft_wrap=True)


def _ignore(piece: str) -> None:
    del piece


if __name__ == "__main__":
    main()
