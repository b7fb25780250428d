"""`twinpool demo`: a cluster of its own on a free port, one question with its timeline, and down again."""

import os
import shutil
from dataclasses import replace

from rich.console import Console

from ..launch.roles import Programs
from ..launch.start import UpOptions, await_ready, start_launcher
from .chat import Question, ask_question
from .timeline import draw_timeline
from .up import Progress, SpecFlags, build_spec, endpoint_of, stop_launcher

QUESTION = "Explain in two sentences why the sky is blue."


def demo_options(flags: SpecFlags, timeout_s: float, programs: Programs) -> UpOptions:
    """Return how to start a cluster whose name and port collide with nothing."""
    spec = build_spec(None, replace(flags, port=0, name=f"demo-{os.getpid()}"))
    return UpOptions(spec, timeout_s=timeout_s, programs=programs)


def run_demo(options: UpOptions, console: Console) -> None:
    """Bring up, ask, draw, take down; everything is ended on every path. Raises LaunchError."""
    console.print("[bold]1. A cluster: one router, a PROMPT pool, a COMPLETION pool[/bold]")
    launcher = start_launcher(options)
    try:
        await_ready(launcher, options, Progress(console))
        endpoint, model = endpoint_of(launcher.spec), launcher.spec.model_name
        console.print(f"[bold]2. A question, over {endpoint}/v1/chat/completions[/bold]", highlight=False)
        console.print(f"> {QUESTION}", markup=False, highlight=False)
        question = Question(QUESTION, max_tokens=96, wants_timing=True)
        answer = ask_question(
            endpoint, model, question, lambda piece: console.print(piece, end="", markup=False, highlight=False)
        )
        console.print("\n[bold]3. Where its time went[/bold]")
        for line in draw_timeline(answer.timing) if answer.timing else ["(the answer came without a timeline)"]:
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    except BaseException:
        console.print(f"\nthat did not work; its logs stay in {launcher.folder.logs}", highlight=False, soft_wrap=True)
        raise
    finally:
        console.print("[bold]4. Down again[/bold]")
        stop_launcher(launcher, options)
        launcher.release()
    shutil.rmtree(launcher.folder.path, ignore_errors=True)  # its logs are of use only when it failed
    console.print("nothing is left running. Your turn: twinpool up")
