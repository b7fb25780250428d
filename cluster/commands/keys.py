"""`twinpool keys`: makes the key files with which router and workers know each other."""

from pathlib import Path
from typing import Annotated

import typer

from ..protocol.keys import ALLOWED, make_keys
from .output import print_json, text_console


def keys_command(
    folder: Annotated[Path, typer.Argument(help="Folder to make; there must be nothing in it yet.")],
    prompt_workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="A pair for each of so many PROMPT workers, not one for all.")
    ] = None,
    completion_workers: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Likewise for COMPLETION workers.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")
    ] = False,
) -> None:
    """Make the keys that encrypt the sockets between router and workers and close them to everybody else.

    FOLDER/router.key, prompt.key and completion.key are secret, mode 0400: each process needs its own and no other.
    FOLDER/allowed/ holds the public halves, which every process needs. Secret keys are never printed.

    \b
        twinpool keys keys                          a pair each for router, PROMPT and COMPLETION workers
        twinpool keys keys --prompt-workers 2       prompt-0 and prompt-1 with a pair each of their own
        twinpool up --keys keys                     a cluster that uses them

    One pair for all workers of a pool lets the pool grow with `twinpool scale`. With a pair a worker, one that was
    broken into cannot pass for its neighbours. Nothing is overwritten: exit code 2 when something is there.
    """
    made = make_keys(folder, holders(prompt_workers, completion_workers))
    if as_json:
        keys = [
            {"holder": name, "public_key": key, "secret_file": str(folder / f"{name}.key")}
            for name, key in made.items()
        ]
        print_json({"folder": str(folder), "keys": keys})
        return
    console = text_console()
    width = max(map(len, made))
    for name, key in made.items():
        console.print(f"{name:<{width}}  {key}", markup=False, highlight=False)
    said = f"made {len(made)} secret keys in {folder}, their public halves in {folder / ALLOWED}"
    console.print(f"{said}\n`twinpool up --keys {folder}` uses them", markup=False, highlight=False, soft_wrap=True)


def holders(prompt_workers: int | None, completion_workers: int | None) -> list[str]:
    """Return who gets a pair: the router, and of each role either all workers together or each by itself."""
    made = ["router"]
    for role, size in (("prompt", prompt_workers), ("completion", completion_workers)):
        made += [role] if size is None else [f"{role}-{i}" for i in range(size)]
    return made
