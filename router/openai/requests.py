"""The bodies of the two completions endpoints: every field known, typed and bounded; what is not served is refused.

First step of a request's life. Turns a JSON object into one of two frozen models; knows no tokenizer and no worker.
"""

from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from ...cluster.protocol.errors import InvalidRequestError
from .chat_template import ChatPrompt
from .conversation import Conversation
from .field_types import MAX_LOGIT_BIASES, Bias, BiasKey, Body, Number, Prompts, Stops, StopTokenIds
from .structured import Structure
from .tools import ToolChoiceField, check_choice

MAX_CHOICES_PER_PROMPT = 16

# Fields that would change the answer and are not served: a value here is a 400, never a silent 200.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "logits_processors": ([],),
    "guided_grammar": (),
    "structured_outputs": (),
}
UNSUPPORTED_IN_CHAT: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "functions": (),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "chat_template": (),
    "documents": (),
}


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingBody(Structure):
    """What both endpoints share."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED

    model: str | None = None
    max_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    min_tokens: int = Field(0, ge=0, le=2**31 - 1)
    temperature: Number = Field(1.0, ge=0, le=2)
    top_p: Number = Field(1.0, ge=0, le=1)
    top_k: int = Field(-1, ge=-1, le=2**31 - 1)
    min_p: Number = Field(0.0, ge=0, le=1)
    presence_penalty: Number = Field(0.0, ge=-2, le=2)
    frequency_penalty: Number = Field(0.0, ge=-2, le=2)
    repetition_penalty: Number = Field(1.0, gt=0, le=2)
    logit_bias: dict[BiasKey, Bias] = Field(default_factory=dict[str, float], max_length=MAX_LOGIT_BIASES)
    n: int = Field(1, ge=1, le=MAX_CHOICES_PER_PROMPT)
    stop: Stops = ()
    stop_token_ids: StopTokenIds = Field(default_factory=list[int])
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True  # without effect: tokens are joined as they are
    include_stop_str_in_output: bool = False
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    timing: bool = False  # extension: where the time went
    return_token_ids: bool = False  # extension, as vLLM has it: the output token ids beside the text
    # Accepted and not interpreted; only their types are checked.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    priority: int | None = Field(None, ge=-(2**63), le=2**63 - 1)

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: dict[str, Any]) -> dict[str, Any]:
        for name, harmless in cls.unsupported.items():
            value = data.get(name)
            if value is not None and not any(value == allowed and type(value) is type(allowed) for allowed in harmless):
                raise PydanticCustomError("unsupported_field", "{field} is not supported here", {"field": name})
        return data

    @model_validator(mode="after")
    def _options_need_stream(self) -> "SamplingBody":
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError(
                "about_field", "{field} is only allowed with stream: true", {"field": "stream_options"}
            )
        return self


class CompletionBody(SamplingBody):
    prompt: Prompts
    echo: bool = False
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = Field(None, ge=1, le=MAX_CHOICES_PER_PROMPT)
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _fields_fit_together(self) -> "CompletionBody":
        if self.best_of is not None and self.best_of < self.n:
            raise PydanticCustomError("about_field", "{field} must not be below n", {"field": "best_of"})
        if self.num_candidates > self.n and self.stream:
            raise PydanticCustomError("about_field", "{field} above n cannot be streamed", {"field": "best_of"})
        return self

    @property
    def num_candidates(self) -> int:
        """How many answers to generate for each prompt; `n` of them are returned."""
        return self.best_of or self.n

    @property
    def num_logprobs(self) -> int | None:
        """How many alternatives to return beside the chosen token's log-probability; None: no log-probabilities."""
        return self.logprobs

    @property
    def scores_prompt(self) -> bool:
        """The prompt's tokens are returned with log-probabilities, too."""
        return self.echo and self.logprobs is not None

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens


class ChatBody(Conversation, SamplingBody):
    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = UNSUPPORTED | UNSUPPORTED_IN_CHAT

    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    tool_choice: ToolChoiceField | None = None
    parallel_tool_calls: bool = True
    echo: bool = False

    @model_validator(mode="after")
    def _fields_fit_together(self) -> "ChatBody":
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("about_field", "{field} needs logprobs: true", {"field": "top_logprobs"})
        check_choice(self.tools, self.tool_choice)
        return self

    @property
    def chat_prompt(self) -> ChatPrompt:
        """Tools that must not be called are not shown."""
        return super().chat_prompt if self.offers_tools else replace(super().chat_prompt, tools=())

    @property
    def offers_tools(self) -> bool:
        return bool(self.tools) and (self.tool_choice is None or self.tool_choice.mode != "none")

    @property
    def num_candidates(self) -> int:
        return self.n

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @property
    def scores_prompt(self) -> bool:
        return False

    @property
    def output_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


B = TypeVar("B", bound=BaseModel)


def parse_body(kind: type[B], data: dict[str, Any]) -> B:
    """Validate `data`; raises InvalidRequestError that names the first wrong field, never its value."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise _explain(error) from error


def parse_known(kind: type[B], data: dict[str, Any]) -> tuple[B, int]:
    """Validate `data`, and count its fields that nobody here knows and that are ignored."""
    refused: dict[str, Any] = getattr(kind, "unsupported", {})
    return parse_body(kind, data), len(data.keys() - kind.model_fields.keys() - refused.keys())


def _explain(error: ValidationError) -> InvalidRequestError:
    first = error.errors(include_url=False, include_input=False)[0]
    kind = first["type"]
    named = first.get("ctx", {}).get("field")
    param = named or _dotted(first["loc"])
    message = first["msg"] if named else f"{param}: {first['msg']}"
    if kind == "missing":
        return InvalidRequestError(f"{param} is required.", param=param, code="missing_required_parameter")
    code = "invalid_value"
    if kind.startswith("unsupported"):
        code = "unsupported_value"
    elif kind.endswith("_type"):
        code = "invalid_type"
    return InvalidRequestError(f"{message}.", param=param, code=code)


def _dotted(location: tuple[int | str, ...]) -> str:
    """('messages', 0, 'content') → 'messages[0].content'; keys that the client made up are not repeated."""
    path = ""
    for part in location:
        if path in ("logit_bias", "metadata", "chat_template_kwargs"):
            break
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{part}" if path else part
    return path
