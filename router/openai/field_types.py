"""What single fields of a body may hold: prompts, stop strings, biases, text content, each checked and bounded.

Knows no endpoint; requests.py puts these together.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 4096
MAX_PROMPTS = 128
MAX_LOGIT_BIASES = 300
MAX_STOP_TOKEN_IDS = 32

Prompt = str | tuple[int, ...]


def _one_prompt(value: Any) -> Prompt:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("prompt_type", "Must be a string, a list of strings, or token ids")
    if not value:
        raise PydanticCustomError("prompt_empty", "A list of token ids must not be empty")
    if not all(type(id) is int for id in value):
        raise PydanticCustomError("prompt_type", "Must hold only strings, only token ids, or only lists of token ids")
    return tuple(value)


def _prompts(value: Any) -> tuple[Prompt, ...]:
    if isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int):
        return (_one_prompt(value),)
    if not isinstance(value, list):
        raise PydanticCustomError("prompt_type", "Must be a string, a list of strings, or token ids")
    if not 1 <= len(value) <= MAX_PROMPTS:
        raise PydanticCustomError("prompt_count", "Must hold 1 to {max} prompts", {"max": MAX_PROMPTS})
    if len({type(prompt) for prompt in value}) != 1:
        raise PydanticCustomError("prompt_type", "Must hold only strings, only token ids, or only lists of token ids")
    return tuple(_one_prompt(prompt) for prompt in value)


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop_type", "Must be a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise PydanticCustomError("stop_count", "Must hold at most {max} strings", {"max": MAX_STOPS})
    if not all(1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise PydanticCustomError("stop_length", "Each must have 1 to {max} characters", {"max": MAX_STOP_CHARACTERS})
    return tuple(stops)


def _bias_key(key: str) -> str:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise PydanticCustomError("bias_key", "Keys must be token ids")
    return key


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


def _content(value: Any) -> str:
    """Join text parts with a newline, in order."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "Must be a string or a list of text parts")
    texts: list[str] = []
    for part in value:
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise PydanticCustomError("content_type", "Each part must be an object with a type")
        if part["type"] != "text":
            raise PydanticCustomError("unsupported", "Only text parts are supported; this model reads nothing else")
        if not isinstance(part.get("text"), str):
            raise PydanticCustomError("content_type", "A text part must have a string as its text")
        texts.append(part["text"])
    return "\n".join(texts)


Number = Annotated[float, Field(allow_inf_nan=False)]
StopTokenIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)]
BiasKey = Annotated[str, AfterValidator(_bias_key)]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
SomeIds = Annotated[list[int], Field(min_length=1)]
Many = Field(min_length=1, max_length=MAX_PROMPTS)
PromptsGiven = str | SomeIds | Annotated[list[str], Many] | Annotated[list[SomeIds], Many]
StopsGiven = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS)]
Prompts = Annotated[tuple[Prompt, ...], BeforeValidator(_prompts, json_schema_input_type=PromptsGiven)]
Stops = Annotated[tuple[str, ...], BeforeValidator(_stops, json_schema_input_type=StopsGiven)]
Text = Annotated[str, BeforeValidator(_content, json_schema_input_type=str | list[TextPart])]


class Body(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise PydanticCustomError("object_type", "Must be an object")
        return {key: value for key, value in data.items() if value is not None}
