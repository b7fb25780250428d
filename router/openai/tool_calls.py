"""Tool calls as models write them: found in the text while it streams, and as a grammar that enforces them.

hermes (Qwen, Hermes and others): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, among other text.
llama3_json (Llama 3.1 and later): an answer that is `{"name": …, "parameters": {…}}`, or several, and nothing else.

What is no call of a known tool stays text. Knows no HTTP and no tokens.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol

from ...engine.grammar import JSON_OPTIONS, json_source

ToolFormat = Literal["hermes", "llama3_json"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
MAX_ENFORCED_CALLS = 16


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON


@dataclass
class Found:
    """New text without the calls in it, and the calls."""

    text: str = ""
    calls: list[ToolCall] = field(default_factory=list[ToolCall])


class CallParser(Protocol):
    def push(self, text: str) -> Found:
        """Take more text; what may be the beginning of a call is held back."""
        ...

    def finish(self) -> Found:
        """Return what is held back: no more text will come."""
        ...


@dataclass(frozen=True)
class ExpectedCalls:
    """Which calls an answer may hold. `is_single`: it ends with its first one."""

    format: ToolFormat
    names: frozenset[str]
    is_single: bool = False

    def parser(self) -> CallParser:
        return HermesCalls(self.names) if self.format == "hermes" else JsonCalls(self.names)


def find_tool_format(template: str) -> ToolFormat | None:
    """Return the format that a chat template asks its model for; None when it is none of ours."""
    if OPEN in template:
        return None if "<function=" in template else "hermes"  # Qwen3-Coder writes XML between the same tags
    return "llama3_json" if '"parameters"' in template else None


class HermesCalls:
    """Whitespace around a call belongs to it, so what is held back is whitespace, or the beginning of its tag."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._searched = 0  # so much of what is held has no closing tag
        self._is_inside = False
        self._follows_call = False

    def push(self, text: str) -> Found:
        self._held += text
        found = Found()
        while self._enter(found) if not self._is_inside else self._leave(found):
            pass
        return found

    def finish(self) -> Found:
        held, self._held = self._held, ""
        call = parse_call(held.lstrip().removeprefix(OPEN), self._names) if self._is_inside else None
        found = Found(calls=[call] if call else [])
        if call is None:
            self._show(found, held)
        return found

    def _enter(self, found: Found) -> bool:
        """Show text up to the next call; True when there is one."""
        start = self._held.find(OPEN)
        self._is_inside = start >= 0
        end = len(self._held[:start].rstrip()) if self._is_inside else len(self._held) - _num_undecided(self._held)
        self._show(found, self._held[:end])
        self._held, self._searched = self._held[end:], 0
        return self._is_inside

    def _leave(self, found: Found) -> bool:
        """Take the call that is held when it is complete; True when it is."""
        end = self._held.find(CLOSE, self._searched)
        if end < 0:
            self._searched = max(0, len(self._held) - len(CLOSE) + 1)
            return False
        body = self._held[:end].lstrip().removeprefix(OPEN)
        call = parse_call(body, self._names)
        if call is None and _ends_in_string(body):  # that tag is a part of an argument
            self._searched = end + len(CLOSE)
            return True
        end += len(CLOSE)
        if call is None:
            self._show(found, self._held[:end])
        else:
            found.calls.append(call)
            self._follows_call = True
        self._held, self._is_inside = self._held[end:], False
        return True

    def _show(self, found: Found, text: str) -> None:
        if self._follows_call:
            text = text.lstrip()
            self._follows_call = not text
        found.text += text


class JsonCalls:
    """An answer that begins with a brace is held back up to the end of each object."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._held = ""
        self._is_text = False
        self._num_calls = 0
        self._object = JsonObject()

    def push(self, text: str) -> Found:
        found = Found()
        for character in text:
            self._held += character
            if self._is_text or not self._is_undecided(character, found):
                found.text += self._held
                self._held, self._is_text = "", True
        return found

    def finish(self) -> Found:
        held, self._held = self._held, ""
        return Found("" if self._num_calls and not held.strip("; \n\t\r") else held)

    def _is_undecided(self, character: str, found: Found) -> bool:
        """Take one more character; False when what is held turns out to be text."""
        if not self._object.is_open and character != "{":
            return character.isspace() or (character == ";" and self._num_calls > 0)
        if not self._object.push(character):
            return True
        call = parse_call(self._held.lstrip("; \n\t\r"), self._names)
        if call is None:
            return False
        found.calls.append(call)
        self._num_calls += 1
        self._held = ""
        return True


class JsonObject:
    """Finds where an object ends, character by character."""

    def __init__(self) -> None:
        self._depth = 0
        self.is_in_string = False
        self._is_escaped = False

    @property
    def is_open(self) -> bool:
        return self._depth > 0

    def push(self, character: str) -> bool:
        """Return True for the character that closes the object."""
        if self.is_in_string:
            self.is_in_string = self._is_escaped or character != '"'
            self._is_escaped = character == "\\" and not self._is_escaped
            return False
        self.is_in_string = character == '"'
        self._depth += (character == "{") - (character == "}")
        return character == "}" and self._depth == 0


def parse_call(text: str, names: frozenset[str]) -> ToolCall | None:
    """Return the call that `text` is, if it calls one of `names` with an object."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        arguments = value.get("arguments", value.get("parameters", {}))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(arguments, dict) or value.get("name") not in names:
            return None
        return ToolCall(f"call_{secrets.token_hex(12)}", value["name"], _dump(arguments))
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def calls_text(calls: Sequence[Mapping[str, Any]]) -> str:
    """Return a message's calls as text, for templates that know none."""
    functions = [{"name": call["function"]["name"], "arguments": call["function"]["arguments"]} for call in calls]
    return "\n".join(f"{OPEN}\n{json.dumps(one, ensure_ascii=False)}\n{CLOSE}" for one in functions)


def calls_grammar(tools: Sequence[tuple[str, Mapping[str, Any]]], expected: ExpectedCalls) -> str:
    """Return the Lark grammar of one call, or of several, of these (name, schema of its arguments)."""
    is_hermes = expected.format == "hermes"
    key, before, after = ("arguments", OPEN + "\n", "\n" + CLOSE) if is_hermes else ("parameters", "", "")
    several = "" if expected.is_single or not is_hermes else f" (/\\n/ call){{0,{MAX_ENFORCED_CALLS - 1}}}"
    lines = ["start: call" + several, "call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, (name, schema) in enumerate(tools):
        begin = f'{before}{{"name": "{name}", "{key}": '
        lines.append(f"call_{i}: {json.dumps(begin)} arguments_{i} {json.dumps('}' + after)}")
        options = {"x-guidance": dict(JSON_OPTIONS)}
        lines.append(f"arguments_{i}: %json {json_source({'type': 'object', **schema, **options})}")
    return "\n".join(lines) + "\n"


def _num_undecided(text: str) -> int:
    """Return how much of the end of `text` may belong to a call: whitespace, then the beginning of its tag."""
    length = next(length for length in range(len(OPEN) - 1, -1, -1) if text.endswith(OPEN[:length]))
    before = text[: len(text) - length]
    return length + len(before) - len(before.rstrip())


def _ends_in_string(text: str) -> bool:
    scanner = JsonObject()
    for character in text:
        scanner.push(character)
    return scanner.is_in_string


def _dump(arguments: dict[str, Any]) -> str:
    text = json.dumps(arguments, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can write and UTF-8 cannot
        return json.dumps(arguments)
    return text


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(name)
