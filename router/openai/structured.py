"""What an answer must look like: `response_format`, `guided_json`, `guided_choice`, `guided_regex`, as a grammar.

Part of both completions bodies. Nothing that would not be obeyed is accepted: the grammar is compiled here, in a thread
of its own and within a time limit, before any worker hears of the request.
"""

import asyncio
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from ...cluster.protocol.errors import InvalidRequestError
from ...cluster.protocol.messages import MAX_GRAMMAR_CHARACTERS, Grammar
from ...engine.grammar import GrammarError, Grammars, json_source
from .field_types import Body

MAX_OPTIONS = 1024  # of guided_choice
COMPILE_LIMIT_S = 2.0  # with the wait for others; the library's own limits end a compilation far sooner
GUIDED = ("guided_json", "guided_choice", "guided_regex")
GrammarKind = Literal["json_schema", "regex", "lark"]


def _schema(value: Any) -> Any:
    """A schema may come as its JSON text, too."""
    if not isinstance(value, str):
        return value
    try:
        schema = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise PydanticCustomError("schema", "Must be a JSON schema, as an object or as its text") from error
    if not isinstance(schema, dict):
        raise PydanticCustomError("schema_type", "Must be a JSON schema, as an object or as its text")
    return schema


class JsonSchemaFormat(Body):
    json_schema: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None  # an answer always obeys


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_is_there(self) -> "ResponseFormat":
        if self.type == "json_schema" and self.json_schema is None:
            field = {"field": "response_format.json_schema"}
            raise PydanticCustomError("about_field", "{field} is required for the type json_schema", field)
        return self


class Structure(Body):
    """The fields that prescribe what the answer looks like."""

    response_format: ResponseFormat | None = None
    guided_json: Annotated[
        dict[str, Any] | None, BeforeValidator(_schema, json_schema_input_type=dict[str, Any] | str | None)
    ] = None
    guided_choice: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1, max_length=MAX_OPTIONS)
    guided_regex: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _is_one_structure(self) -> "Structure":
        given = [name for name in GUIDED if getattr(self, name) is not None]
        if self.response_format is not None and self.response_format.type != "text":
            given.append("response_format")
        if len(given) > 1:
            raise PydanticCustomError("about_field", "{field} does not go with {other}", _pair(given))
        return self

    @property
    def structure(self) -> "Structured | None":
        """The grammar that these fields ask for; None: any text. Raises InvalidRequestError."""
        if self.guided_json is not None:
            return structured("guided_json", "json_schema", json_source(self.guided_json))
        if self.guided_choice is not None:
            options = " | ".join(json.dumps(option, ensure_ascii=False) for option in self.guided_choice)
            return structured("guided_choice", "lark", f"start: {options}")
        if self.guided_regex is not None:
            return structured("guided_regex", "regex", self.guided_regex)
        asked = self.response_format
        if asked is None or asked.type == "text":
            return None
        schema = {"type": "object"} if asked.json_schema is None else asked.json_schema.json_schema
        return structured("response_format", "json_schema", json_source(schema))


@dataclass(frozen=True)
class Structured:
    """A grammar, and the field that asked for it."""

    param: str
    grammar: Grammar


def structured(param: str, kind: GrammarKind, source: str) -> Structured:
    """Raises InvalidRequestError for a source that is too long."""
    if len(source) > MAX_GRAMMAR_CHARACTERS:
        message = f"{param} comes to {len(source)} characters; at most {MAX_GRAMMAR_CHARACTERS} are allowed."
        raise InvalidRequestError(message, param=param)
    return Structured(param, Grammar(kind=kind, source=source))


class GrammarCheck:
    """Compiles grammars before they go to workers. `count` is told how each came out."""

    def __init__(
        self, grammars: Grammars | None, count: Callable[[str], None], limit_s: float = COMPILE_LIMIT_S
    ) -> None:
        self._grammars = grammars
        self._count = count
        self._limit_s = limit_s
        self._thread = ThreadPoolExecutor(1, "grammar")

    async def check(self, asked: Structured) -> None:
        """Raises InvalidRequestError for a grammar that is wrong, too large, or that nobody here can obey."""
        grammars = self._grammars
        if grammars is None:
            message = f"{asked.param} is not supported here: the engines of this cluster know no grammars."
            raise InvalidRequestError(message, param=asked.param, code="unsupported_value")
        if grammars.has(asked.grammar):
            return self._count("known")
        compiling = asyncio.get_running_loop().run_in_executor(self._thread, grammars.begin, asked.grammar)
        try:
            await asyncio.wait_for(compiling, self._limit_s)
        except GrammarError as error:
            self._count("refused")
            message = f"{asked.param} cannot be obeyed: {error.message}."
            raise InvalidRequestError(message, param=asked.param) from error
        except TimeoutError as error:
            self._count("timed_out")
            message = f"{asked.param} took longer to compile than the {self._limit_s:g} s allowed."
            raise InvalidRequestError(message, param=asked.param) from error
        self._count("compiled")


def _pair(given: list[str]) -> dict[str, Any]:
    return {"field": given[0], "other": given[1]}
