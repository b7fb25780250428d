"""What the documents say is true: their commands run, their tables name what there is, their messages are ours.

Conventions in the Markdown: `<!-- runs -->` before a fenced `sh` or `python` block has it run here, in the slow suite;
`<!-- runs alone -->` says that it needs neither a cluster nor a block before it, and has it run in the ordinary suite
too. `<!-- prints -->` before a `text` block right after it names lines that must come out, in this order;
`<!-- file: NAME -->` before a block writes it down for the blocks that follow. In a printed line any number stands for
any number, `…` for anything; after `<!-- prints exactly -->` only `…` does.
"""

import asyncio
import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from documents import (
    API,
    ARCHITECTURE,
    CODE,
    KEYS,
    OPERATIONS,
    README,
    ROOT,
    SIZING,
    code_in,
    shipped_strings,
    table_under,
)
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from twinpool.cluster.commands.status import COLUMNS
from twinpool.cluster.config import ClusterSpec
from twinpool.cluster.doctor import CHECKS
from twinpool.cluster.metrics import Timeline
from twinpool.cluster.protocol.codec import FROM_ROUTER, FROM_WORKER
from twinpool.cluster.protocol.messages import Load
from twinpool.kvtransfer.frames import ANNOUNCING_FROM_RECEIVER, ANNOUNCING_FROM_SENDER
from twinpool.router.generation import Caller, Deliver, GenerationFailed, GenerationRequest
from twinpool.router.metrics import Metrics
from twinpool.router.openai.errors import FAILURE_API_CODE, FAILURE_STATUS
from twinpool.router.openai.formats import DERIVED
from twinpool.router.openai.requests import ChatBody, CompletionBody, SamplingBody

DOCUMENTS = [README, *sorted((ROOT / "docs").glob("*.md"))]
MARK = r"runs|runs alone|prints|prints exactly|file: [\w.]+"
BLOCK = re.compile(rf"^<!-- ({MARK}) -->\n```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCK_TIMEOUT_S = 400.0


@dataclass
class Step:
    """A block to run, with what is to be written down before it and what it must print."""

    language: str
    source: str
    files: dict[str, str]
    needs_cluster: bool
    prints: str = ""
    is_exact: bool = False  # of what it prints: numbers stand for themselves


def steps_of(markdown: str) -> list[Step]:
    """Return the marked blocks of a document in order."""
    steps: list[Step] = []
    files: dict[str, str] = {}
    for mark, language, source in BLOCK.findall(markdown):
        if mark.startswith("file: "):
            files[mark.removeprefix("file: ")] = source
        elif mark.startswith("runs"):
            steps.append(Step(language, source, files, needs_cluster=mark == "runs"))
            files = {}
        else:
            steps[-1].prints, steps[-1].is_exact = source, mark == "prints exactly"
    return steps


def missing_lines(expected: str, printed: str, is_exact: bool = False) -> list[str]:
    """Return the expected lines that do not come out in their order."""
    missing: list[str] = []
    rest = [" ".join(line.split()) for line in printed.splitlines()]
    for line in filter(None, (" ".join(line.split()) for line in expected.splitlines())):
        pattern = re.compile(".*".join(map(re.escape, line.split("…"))) if is_exact else _pattern(line))
        found = next((i for i, candidate in enumerate(rest) if pattern.fullmatch(candidate)), None)
        if found is None:
            missing.append(line)
        else:
            rest = rest[found + 1 :]
    return missing


def _pattern(line: str) -> str:
    """Numbers stand for numbers, bars for bars of any length, `…` for anything."""
    parts = re.split(r"(-?\d+(?:\.\d+)?|…| ?[█▏] ?)", line)
    wild = {"…": ".*"}
    return "".join(
        re.escape(part) if i % 2 == 0 else wild.get(part, r" ?[█▏]* ?" if part.strip() in "█▏" else r"-?\d+(?:\.\d+)?")
        for i, part in enumerate(parts)
    )


class Reader:
    """Somebody who follows a document: an own folder with our documents in it, an own cache, an own port."""

    def __init__(self, folder: Path, model: Path | None = None) -> None:
        self.folder = folder
        (folder / "docs").symlink_to(ROOT / "docs")
        self.cache = folder / "cache"
        (self.cache / "models").mkdir(parents=True)
        if model is not None:
            (self.cache / "models" / model.name).symlink_to(model)
        programs = str(Path(sys.executable).parent)
        self.environment = {
            **os.environ,
            "TWINPOOL_CACHE": str(self.cache),
            "PATH": programs + os.pathsep + os.environ["PATH"],
        }
        self.environment.pop("COLUMNS", None)  # tables are as wide as where nobody knows the width
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]

    def follow(self, step: Step) -> None:
        """Run one block; fails unless its exit code is 0 and it prints what the document shows."""
        self.write_files(step)
        source = step.source.replace("127.0.0.1:8000", f"127.0.0.1:{self.port}")
        source = re.sub(r"^(twinpool up\b)", rf"\1 --port {self.port}", source, flags=re.MULTILINE)
        # A machine that runs tests is seldom quiet, and what it measures is not looked at.
        source = re.sub(r"^(twinpool calibrate\b)", r"\1 --max-disturbance 99", source, flags=re.MULTILINE)
        shell = ["bash", "-euo", "pipefail", "-c", source]
        code, printed = self._run(shell if step.language == "sh" else [sys.executable, "-c", source])
        assert code == 0, f"{source}\n{printed}"
        assert missing_lines(step.prints, printed, step.is_exact) == [], f"{source}\n{printed}"

    def write_files(self, step: Step) -> None:
        for name, text in step.files.items():
            (self.folder / name).write_text(text)

    def clean_up(self) -> None:
        """End every cluster that a block left running."""
        runs = self.cache / "runs"
        for run in sorted(runs.iterdir()) if runs.is_dir() else []:
            code, printed = self._run(["twinpool", "down", "--name", run.name])
            assert code == 0, printed

    def _run(self, command: list[str]) -> tuple[int, str]:
        process = subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=BLOCK_TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return process.returncode, printed


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("document", [README, OPERATIONS, API, SIZING], ids=lambda path: path.name)
def test_the_marked_commands_run_as_shown(document: Path, tmp_path: Path, smollm2: Path) -> None:
    """Whoever copies the commands, in order, gets what the document shows."""
    steps = steps_of(document.read_text())
    assert steps
    reader = Reader(tmp_path, smollm2)
    try:
        for step in steps:
            reader.follow(step)
    finally:
        reader.clean_up()


@pytest.mark.parametrize(
    "document", [README, KEYS, pytest.param(SIZING, marks=pytest.mark.slow)], ids=lambda path: path.name
)
def test_what_needs_no_cluster_runs_as_shown(document: Path, tmp_path: Path) -> None:
    """What can be simulated is the same everywhere, to the last printed digit."""
    steps = steps_of(document.read_text())
    assert any(not step.needs_cluster for step in steps)
    reader = Reader(tmp_path)
    for step in steps:
        if step.needs_cluster:
            reader.write_files(step)
        else:
            reader.follow(step)


def test_the_marks_are_understood() -> None:
    """A mark that the pattern above misses would be a command that nobody runs."""
    for document in DOCUMENTS:
        text = document.read_text()
        assert len(BLOCK.findall(text)) == text.count("<!-- "), f"{document.name} has a mark that is not understood"


@pytest.mark.parametrize(
    ("expected", "printed", "missing"),
    [
        ("ready in 7.2 s", "x\nready  in 11 s\n", []),
        ("one\ntwo", "two\none\n", ["two"]),
        ("prefill 9 ms ███ computed", "prefill 10.5 ms ▏      computed", []),
        ("the … blue", "the sky is blue", []),
        ("ready", "not ready", ["ready"]),
    ],
)
def test_printed_lines_are_compared(expected: str, printed: str, missing: list[str]) -> None:
    assert missing_lines(expected, printed) == missing


def test_numbers_count_where_lines_are_compared_exactly() -> None:
    assert missing_lines("C* = 115 tokens: …", "C*  = 115 tokens: split", is_exact=True) == []
    assert missing_lines("C* = 115 tokens", "C* = 116 tokens", is_exact=True) == ["C* = 115 tokens"]


def test_the_links_between_the_documents_lead_somewhere() -> None:
    for document in [*DOCUMENTS, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def fields_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield each key with its default as JSON; `prompt` and `completion` are both POOL."""
    for name, field in section.model_fields.items():
        annotation: Any = field.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from fields_of(annotation, f"{prefix}{'POOL' if name in ('prompt', 'completion') else name}.")
        else:
            default: Any = field.get_default(call_default_factory=True, validated_data={})
            assert default is not PydanticUndefined, f"{prefix}{name} has no default"
            yield prefix + name, json.dumps(default)


def test_the_spec_reference_lists_every_key_with_its_default() -> None:
    documented = {code_in(row[0]): code_in(row[1]) for row in table_under(OPERATIONS, "The spec")}
    assert documented == dict(fields_of(ClusterSpec))


class EmptyBackend:
    """A cluster without workers, as the metrics see it."""

    is_ready = False
    max_model_len = None

    def status(self) -> dict[str, Any]:
        load = Load(num_blocks=1, num_free_blocks=1).model_dump()
        return {"queued": 0, "workers": [{"name": "prompt-0", "role": "PROMPT", "state": "alive", "load": load}]}

    def submit(self, request: GenerationRequest, deliver: Deliver) -> None:
        deliver(GenerationFailed("no_worker", request.request_id))

    def cancel(self, request_id: str) -> None:
        """Nothing was begun here."""

    def refusal(self, caller: Caller, priority: int) -> None:
        return None

    def finish(self, request_id: str) -> None:
        """Nothing was begun here."""


def test_the_metrics_table_lists_every_metric() -> None:
    page = asyncio.run(Metrics(EmptyBackend(), "model").exposition()).decode()
    exposed = {name for name in re.findall(r"^# TYPE ([\w:]+)", page, re.MULTILINE) if not name.endswith("_created")}
    assert {code_in(row[0]) for row in table_under(OPERATIONS, "Metrics")} == exposed


def test_the_status_table_explains_every_column() -> None:
    assert [code_in(row[0]) for row in table_under(OPERATIONS, "Status")] == list(COLUMNS)


def test_the_doctor_table_lists_every_check() -> None:
    assert [code_in(row[0]) for row in table_under(OPERATIONS, "Doctor")] == list(CHECKS)


def test_the_failure_table_quotes_messages_that_exist() -> None:
    """Each quoted message, but for its variable parts (`…`), stands in one string of the code."""
    strings = shipped_strings()
    rows = table_under(OPERATIONS, "When something goes wrong")
    assert len(rows) >= 12
    for row in rows:
        for message in CODE.findall(row[0]):
            parts = [re.escape(part) for part in message.split("…") if part.strip()]
            assert parts, f"{message!r} says nothing"
            assert any(re.search(".*".join(parts), string) for string in strings), f"{message!r} is not ours"


@pytest.mark.parametrize(
    ("heading", "kinds"),
    [
        ("Control messages", {**FROM_WORKER, **FROM_ROUTER}),
        ("Data messages", {**ANNOUNCING_FROM_SENDER, **ANNOUNCING_FROM_RECEIVER}),
    ],
)
def test_the_message_tables_list_every_message_with_its_fields(heading: str, kinds: dict[str, type[BaseModel]]) -> None:
    documented = {code_in(row[0]): set(CODE.findall(row[2])) for row in table_under(ARCHITECTURE, heading)}
    assert documented == {name: set(kind.model_fields) for name, kind in kinds.items()}


@pytest.mark.parametrize(
    ("heading", "body"),
    [("Fields of both", SamplingBody), ("Only in completions", CompletionBody), ("Only in chat", ChatBody)],
)
def test_the_field_tables_list_every_field(heading: str, body: type[SamplingBody]) -> None:
    shared = set() if body is SamplingBody else set(SamplingBody.model_fields)
    documented = {name for row in table_under(API, heading) for name in CODE.findall(row[0])}
    assert documented == set(body.model_fields) - shared


def test_the_timing_table_lists_every_field() -> None:
    names = {field.name for field in dataclasses.fields(Timeline)} | set(DERIVED)
    assert {name for row in table_under(API, "Timing") for name in CODE.findall(row[0])} == names


def test_the_error_table_lists_codes_that_the_router_answers_with() -> None:
    """Every code of a failed generation is there, and every code that is there stands in the code."""
    rows = table_under(API, "Errors")
    documented = {code: int(row[0]) for row in rows for code in CODE.findall(row[1])}
    failures = {FAILURE_API_CODE.get(code, code): status for code, status in FAILURE_STATUS.items()}
    assert {code: documented.get(code) for code in failures} == failures
    assert set(documented) - shipped_strings() == set()
