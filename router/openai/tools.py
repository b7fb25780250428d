"""The tools that a client offers: which functions, whether one must be called, and calls in earlier messages.

Part of a conversation and of the chat body. What the model's template or format cannot do is refused, never ignored.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from ...cluster.protocol.errors import InvalidRequestError
from .field_types import Body
from .structured import Structured, structured
from .tool_calls import ExpectedCalls, ToolFormat, calls_grammar

MAX_TOOLS = 128
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: dict(NO_PARAMETERS))
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"]
    function: Function

    @property
    def for_template(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}


def _distinct(tools: list[Tool]) -> list[Tool]:
    if len({tool.function.name for tool in tools}) != len(tools):
        raise PydanticCustomError("tool_names", "Each function must have a name of its own")
    return tools


def _arguments(value: Any) -> Any:
    """Templates want an object; clients send its JSON text."""
    if not isinstance(value, str):
        return value
    try:
        arguments = json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("arguments", "Must be the text of a JSON object") from error
    if not isinstance(arguments, dict):
        raise PydanticCustomError("arguments_type", "Must be the text of a JSON object")
    return arguments


class CalledFunction(Body):
    name: FunctionName
    arguments: Annotated[dict[str, Any], BeforeValidator(_arguments, json_schema_input_type=dict[str, Any] | str)] = (
        Field(default_factory=dict[str, Any])
    )


class MadeCall(Body):
    """A call in an earlier message of the assistant."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


@dataclass(frozen=True)
class ToolChoice:
    """`name`: the function that must be called, with the mode `required`."""

    mode: Literal["none", "auto", "required"]
    name: str | None = None


class NamedFunction(TypedDict):
    name: str


class NamedTool(TypedDict):
    type: Literal["function"]
    function: NamedFunction


def _tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    function: Any = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name: Any = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        names = 'Must be "none", "auto", "required", or {"type": "function", "function": {"name": …}}'
        raise PydanticCustomError("tool_choice", names)
    return ToolChoice("required", name)


Tools = Annotated[list[Tool], Field(min_length=1, max_length=MAX_TOOLS), AfterValidator(_distinct)]
ToolChoiceGiven = Literal["none", "auto", "required"] | NamedTool
ToolChoiceField = Annotated[ToolChoice, BeforeValidator(_tool_choice, json_schema_input_type=ToolChoiceGiven)]


def check_choice(tools: Sequence[Tool], choice: ToolChoice | None) -> None:
    """Raise PydanticCustomError for a choice that goes with no tool."""
    field = {"field": "tool_choice"}
    if choice is None or choice.mode == "none":
        return
    if not tools:
        raise PydanticCustomError("about_field", "{field} needs tools", field)
    if choice.name is not None and choice.name not in {tool.function.name for tool in tools}:
        raise PydanticCustomError("about_field", "{field} names a function that is none of the tools", field)


def expect_calls(
    tools: Sequence[Tool], choice: ToolChoice, is_parallel: bool, tool_format: ToolFormat | None
) -> tuple[ExpectedCalls, Structured | None]:
    """Return which calls to look for, and the grammar that enforces them, if one must be made.

    Raises InvalidRequestError when the model has no format of calls that is known here.
    """
    if tool_format is None:
        message = "tools are not supported here: the model's chat template asks for no format of calls that is known."
        raise InvalidRequestError(message, param="tools", code="unsupported_value")
    names = frozenset(tool.function.name for tool in tools)
    is_single = not is_parallel or choice.name is not None
    expected = ExpectedCalls(tool_format, names, is_single)
    if choice.mode == "auto":
        return expected, None
    callable_now = [tool.function for tool in tools if choice.name in (None, tool.function.name)]
    grammar = calls_grammar([(function.name, function.parameters) for function in callable_now], expected)
    return expected, structured("tools", "lark", grammar)
