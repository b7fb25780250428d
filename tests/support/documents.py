"""The documents, their tables, and the strings of the code that they may quote."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
ARCHITECTURE, API, KEYS, OPERATIONS, SIZING = (
    ROOT / "docs" / f"{name}.md" for name in ("architecture", "api", "keys", "operations", "sizing")
)
CODE = re.compile(r"`([^`]+)`")


def table_under(document: Path, heading: str) -> list[list[str]]:
    """Return the cells of the rows of the first table under a heading, without its head."""
    section = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", document.read_text(), re.MULTILINE | re.DOTALL)
    assert section, f"{document.name} has no section {heading!r}"
    lines = [line for line in section[1].splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert rows, f"{document.name} has no table under {heading!r}"
    return rows


def code_in(cell: str) -> str:
    found = CODE.findall(cell)
    assert found, f"no code in {cell!r}"
    return found[0]


def shipped_strings() -> set[str]:
    """Return every string in the shipped source; the expressions inside f-strings are `…`."""
    packages = ["cluster", "decode_worker", "engine", "kernels", "kvtransfer", "prefill_worker", "router"]
    found: set[str] = set()
    for file in (file for name in packages for file in sorted((ROOT / name).rglob("*.py"))):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                found.add("".join(str(v.value) if isinstance(v, ast.Constant) else "…" for v in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found
