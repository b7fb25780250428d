"""The promises of the repository as a whole: what is imported where, what is never called, and that prose is true."""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import grimp
import pytest
import twinpool
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from twinpool.cluster.cli import build_app
from twinpool.cluster.launch.roles import Programs
from typer.testing import CliRunner

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PYPROJECT["tool"]["setuptools"]["packages"]
FOLDERS_WITHOUT_PACKAGES = {"tests", "benchmarks", "docs", "helm", "build", "dist"}

PURE_CORES = [
    "twinpool.cluster.doctor",
    "twinpool.cluster.membership",
    "twinpool.decode_worker.core",
    "twinpool.engine.block_pool",
    "twinpool.engine.decode_scheduler",
    "twinpool.engine.ownership",
    "twinpool.engine.prefill_scheduler",
    "twinpool.engine.probe",
    "twinpool.engine.stopping",
    "twinpool.kvtransfer.credits",
    "twinpool.kvtransfer.frames",
    "twinpool.kvtransfer.receiver",
    "twinpool.kvtransfer.sender",
    "twinpool.prefill_worker.core",
    "twinpool.router.core",
    "twinpool.router.dispatch",
    "twinpool.router.lifecycle",
    "twinpool.router.probes",
    "twinpool.router.placement",
]
IMPURE = {
    *("asyncio", "concurrent", "multiprocessing", "queue", "selectors", "socket", "subprocess", "threading", "time"),
    *("httpx", "ray", "torch", "transformers", "zmq"),
}

WALL_CLOCKS = {
    *("time.time", "time.time_ns", "time.localtime", "time.gmtime", "time.ctime", "time.strftime", "time.asctime"),
    *("datetime.datetime.now", "datetime.datetime.utcnow", "datetime.datetime.today", "datetime.date.today"),
}
SHOWS_THE_TIME = {
    "cluster/commands/calibrate.py": "when a profile was measured",
    "cluster/launch/child.py": "when a process ended, in its log and in the status",
    "cluster/launch/launcher.py": "since when a cluster runs",
    "cluster/launch/pools.py": "how long ago something happened",
    "cluster/launch/processes.py": "when a supervisor died",
    "router/model_routes.py": "the field `created`",
    "router/openai/chat_template.py": "today's date, where a template asks for it",
    "router/openai/formats.py": "the field `created`",
    "router/otlp.py": "when a span began",
}

LINKS_AND_CHANNELS = r"router/link\.py|cluster/protocol/(link|curve)\.py|kvtransfer/\w*channel\w*\.py"
MAY_OPEN = {
    "zmq context": re.compile(LINKS_AND_CHANNELS + r"|(prefill|decode)_worker/worker\.py"),  # one a process, shared
    "zmq socket": re.compile(LINKS_AND_CHANNELS),
    # open_channel.py asks the kernel which of our addresses leads to a host, by one that sends nothing
    "plain socket": re.compile(r"cluster/launch/\w+\.py|kvtransfer/open_channel\.py"),
}
PARTS_OF_PYDANTIC = {"pydantic_core"}  # its documentation imports errors from there; it pins the version itself
RUN_CODE_WHEN_LOADED = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec"}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj", "torch.load", "yaml.full_load", "yaml.unsafe_load"}


def package_files() -> list[Path]:
    """Return every Python file that is shipped, relative to the root."""
    folders = [Path(*name.split(".")[1:]) for name in PACKAGES]
    return sorted(file.relative_to(ROOT) for folder in folders for file in (ROOT / folder).glob("*.py"))


def all_python_files() -> list[Path]:
    tests_and_benchmarks = (file for name in ("tests", "benchmarks") for file in (ROOT / name).rglob("*.py"))
    return package_files() + sorted(file.relative_to(ROOT) for file in tests_and_benchmarks)


def calls_in(source: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield each call with its name as written: `open`, `zmq.Context`, `context.socket`, `?.socket`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            yield dotted_name(node.func), node


def dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return "?"


def imports_in(source: str) -> set[str]:
    """Return the top-level names of the absolute imports."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            names.add(node.module.split(".")[0])
    return names


def socket_calls(source: str) -> list[tuple[str, int]]:
    """Return what is opened, as a key of MAY_OPEN, and in which line."""
    patterns = {
        "plain socket": r"socket\.(socket|socketpair|create_server|create_connection)",
        "zmq context": r"(.*\.)?Context(\.instance)?",
        "zmq socket": r".*\.socket",
    }
    found: list[tuple[str, int]] = []
    for name, call in calls_in(source):
        kinds = [kind for kind, pattern in patterns.items() if re.fullmatch(pattern, name)]
        found += [(kind, call.lineno) for kind in kinds[:1]]
    return found


def code_running_calls(source: str) -> list[int]:
    """Return the lines of calls that could run code found in data."""
    lines: list[int] = []
    for name, call in calls_in(source):
        method = name.rsplit(".", 1)[-1]
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        unsafe_yaml = name == "yaml.load" and "SafeLoader" not in keywords.get("Loader", "")
        if (
            name in FORBIDDEN_CALLS
            or name in FORBIDDEN_METHODS
            or method in FORBIDDEN_METHODS
            or unsafe_yaml
            or keywords.get("allow_pickle", "False") != "False"
        ):
            lines.append(call.lineno)
    return lines


def wall_clock_calls(source: str) -> list[int]:
    """Return the lines in which the wall clock is read, or handed on as a clock."""
    tree = ast.parse(source)
    full: dict[str, str] = {}  # name in this module → what was imported under it
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            full.update({alias.asname or alias.name: prefix + alias.name for alias in node.names})
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name):
            first, _, rest = ast.unparse(node).partition(".")
            if f"{full.get(first, '')}.{rest}".strip(".") in WALL_CLOCKS:
                lines.add(node.lineno)
    return sorted(lines)


def test_every_folder_with_python_files_is_a_listed_package() -> None:
    """A folder missing from `packages` works in the editable install and is absent from the wheel."""
    folders = {Path()}
    for top in ROOT.iterdir():
        if top.is_dir() and top.name not in FOLDERS_WITHOUT_PACKAGES and not re.match(r"[._]|.*\.egg-info$", top.name):
            folders.update(file.parent.relative_to(ROOT) for file in top.rglob("*.py"))
    assert sorted(".".join(["twinpool", *folder.parts]) for folder in folders) == sorted(PACKAGES)


def test_every_module_says_what_it_is_for() -> None:
    files = package_files()
    assert files
    assert [str(file) for file in files if not ast.get_docstring(ast.parse((ROOT / file).read_text()))] == []


def test_nothing_is_left_for_later() -> None:
    """A note to finish something belongs in an issue."""
    words = re.compile(r"\b(" + "|".join(["TO" + "DO", "FIX" + "ME", "X" * 3]) + r")\b|\bNotImplemented" + r"Error\b")
    assert [str(file) for file in all_python_files() if words.search((ROOT / file).read_text())] == []


def test_the_deciding_modules_touch_no_socket_thread_tensor_or_clock() -> None:
    """DESIGN: pure cores. What they import, directly or through our other modules, does no I/O either."""
    graph = grimp.build_graph("twinpool", include_external_packages=True, cache_dir=None)
    assert [name for name in PURE_CORES if name not in graph.modules] == []
    impure = {name: sorted(graph.find_upstream_modules(name) & IMPURE) for name in PURE_CORES}
    assert {name: found for name, found in impure.items() if found} == {}


def test_sockets_are_opened_only_in_the_links_and_channels() -> None:
    wrong: list[str] = []
    for file in package_files():
        for kind, line in socket_calls((ROOT / file).read_text()):
            if not MAY_OPEN[kind].fullmatch(file.as_posix()):
                wrong.append(f"{file}:{line} opens a {kind}")
    assert wrong == []


def test_the_wall_clock_is_only_shown() -> None:
    """What decides, waits or measures takes the monotonic clock; only what people or other programs read has a date."""
    read = {file.as_posix(): wall_clock_calls((ROOT / file).read_text()) for file in package_files()}
    assert {file for file, lines in read.items() if lines} == SHOWS_THE_TIME.keys()


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("import time\ntime.time()", 2),
        ("from time import time_ns\nx = time_ns() / 1e9", 2),
        ("import datetime\n\ndatetime.datetime.now(datetime.UTC)", 3),
        ("from datetime import datetime\ndatetime.now()", 2),
        ("from datetime import date\ndate.today()", 2),
        ("import time\nwait(clock=time.time)", 2),
        ("import time as t\nt.time()", 2),
    ],
)
def test_the_clock_rule_sees_the_wall_clock(source: str, line: int) -> None:
    assert wall_clock_calls(source) == [line]


def test_the_clock_rule_lets_other_clocks_pass() -> None:
    assert (
        wall_clock_calls("import time\ntime.monotonic()\ntime.sleep(1)\nrecord.time()\ndatetime.fromtimestamp(x)") == []
    )


def test_no_shipped_module_can_run_code_found_in_data() -> None:
    wrong: list[str] = []
    for file in package_files():
        source = (ROOT / file).read_text()
        wrong += [f"{file} imports {name}" for name in sorted(imports_in(source) & RUN_CODE_WHEN_LOADED)]
        wrong += [f"{file}:{line}" for line in code_running_calls(source)]
    assert wrong == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import zmq\nc = zmq.Context()", [("zmq context", 2)]),
        ("c = Context.instance()", [("zmq context", 1)]),
        ("s = f().socket(zmq.DEALER)", [("zmq socket", 1)]),
        ("s = zmq.asyncio.Context().socket(zmq.ROUTER)", [("zmq socket", 1), ("zmq context", 1)]),
        ("s = socket.socket()", [("plain socket", 1)]),
        ("s = socket.create_server(a)", [("plain socket", 1)]),
        ("x = websocket(1); y.sockets(); EngineContext()", []),
    ],
)
def test_the_socket_rule_sees_sockets(source: str, expected: list[tuple[str, int]]) -> None:
    assert socket_calls(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        *("eval(x)", "exec(x)", "s.recv_pyobj()", "self.sock.send_pyobj(x)", "torch.load(f)", "yaml.unsafe_load(x)"),
        *("yaml.load(x)", "yaml.load(x, Loader=yaml.Loader)", "np.load(f, allow_pickle=True)"),
    ],
)
def test_the_data_rule_sees_what_runs_code(source: str) -> None:
    assert code_running_calls(source) == [1]


@pytest.mark.parametrize("source", ["model.eval()", "yaml.safe_load(x)", "yaml.load(x, Loader=yaml.SafeLoader)"])
def test_the_data_rule_lets_harmless_calls_pass(source: str) -> None:
    assert code_running_calls(source) == []


@dataclass(frozen=True)
class Violation:
    file: str
    line: str
    broken: str


VIOLATIONS = [
    Violation("router/generation.py", "from .. import decode_worker", "Layers"),
    Violation("kvtransfer/layout.py", "from ..engine import sequence", "Layers"),
    Violation("kernels/__init__.py", "from .. import kvtransfer", "Layers"),
    Violation("engine/sequence.py", "from ..cluster import launch", "Layers"),
    Violation("cluster/config.py", "from . import role", "Layers inside cluster"),
    Violation("cluster/stray.py", '"""A module without a place."""', "Layers inside cluster"),
    Violation("cluster/metrics.py", "from ..router import generation", "The launcher starts roles by name"),
    Violation("router/generation.py", "import torch", "No torch in the control plane, not even through another module"),
    Violation("engine/sequence.py", "import ray", "Ray only in the launcher"),
]


@pytest.mark.parametrize("violation", VIOLATIONS, ids=lambda v: f"{v.file}: {v.line}")
def test_the_import_contracts_catch_a_planted_violation(violation: Violation, tmp_path: Path) -> None:
    """The root folder is the package and its imports are relative: a linter that saw neither would keep every rule."""
    copy = tmp_path / "twinpool"
    for file in [*package_files(), Path("pyproject.toml")]:
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, copy / file)
    with (copy / violation.file).open("a") as planted:
        planted.write(f"\n{violation.line}\n")
    lint = subprocess.run(
        [beside_python("lint-imports"), "--no-cache", "--no-logo"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(tmp_path), "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert lint.returncode == 1
    assert re.search(rf"^{re.escape(violation.broken)} BROKEN", lint.stdout, re.MULTILINE), lint.stdout


def test_the_version_is_that_of_the_newest_changelog_entry() -> None:
    newest = re.search(r"^## \[(\d+\.\d+\.\d+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest
    assert newest[1] == twinpool.__version__


def test_every_dependency_is_pinned_to_an_allowed_version() -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if line)
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    extras: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
    wanted = [Requirement(text) for text in sum(extras.values(), PYPROJECT["project"]["dependencies"])]
    assert wanted
    unpinned = [str(r) for r in wanted if not r.specifier.contains(versions.get(canonicalize_name(r.name), "0"))]
    assert unpinned == []


def test_every_distribution_that_is_imported_is_declared() -> None:
    """What only another package brings in may be gone with that package's next release."""
    distributions = packages_distributions()
    extras: dict[str, list[str]] = PYPROJECT["project"]["optional-dependencies"]
    texts = [*PYPROJECT["project"]["dependencies"], *extras["gpu"], *extras["otel"]]
    declared = {canonicalize_name(Requirement(text).name) for text in texts}
    undeclared: list[str] = []
    for file in package_files():
        for name in sorted(imports_in((ROOT / file).read_text()) - sys.stdlib_module_names - PARTS_OF_PYDANTIC):
            if not declared & {canonicalize_name(found) for found in distributions.get(name, [name])}:
                undeclared.append(f"{file} imports {name}")
    assert undeclared == []


def test_the_first_screen_of_the_readme_gives_the_two_commands() -> None:
    screen = (ROOT / "README.md").read_text().splitlines()[:40]
    assert {"make demo", "make test"} <= {line.split("#")[0].strip() for line in screen}


def documented_commands(program: str) -> list[list[str]]:
    """Return the words of each line in a fenced `sh` block of our documents that starts with `program`."""
    found: list[list[str]] = []
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for block in re.findall(r"^```sh\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found += [
                shlex.split(line, comments=True) for line in lines if re.match(rf"(\.venv/bin/)?{program} ", line)
            ]
    return found


def test_every_make_target_that_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {word for words in documented_commands("make") for word in words[1:] if "=" not in word}
    assert named
    assert named - targets == set()


def test_every_command_and_flag_that_the_documents_name_exists() -> None:
    commands = documented_commands("twinpool")
    assert commands
    flags: dict[str, set[str]] = {}
    for words in commands:
        given = {word.split("=")[0] for word in words[2:] if word.startswith("--")}
        flags.setdefault(words[1], set()).update(given)
    missing = {name: used - flags_of_command(name) for name, used in flags.items()}
    assert {name: unknown for name, unknown in missing.items() if unknown} == {}


def flags_of_command(name: str) -> set[str]:
    """Return the flags in the command's own help; fails when there is no such command."""
    shown = CliRunner().invoke(build_app(Programs()), [name, "--help"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, f"twinpool {name} --help: {shown.output}"
    return set(re.findall(r"--[a-z][a-z-]*", shown.output))


def beside_python(program: str) -> str:
    """Return the path of a console script of this virtual environment."""
    return str(Path(sys.executable).with_name(program))
