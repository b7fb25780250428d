"""The conversation that a chat prompt is rendered from: its messages, and how the template is to end it.

Part of the chat completion's body and of /tokenize's. Knows no template.
"""

import json
from typing import Any, Literal

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from .chat_template import RESERVED_NAMES, ChatPrompt
from .field_types import Body, Text
from .tools import MadeCall, Tool, Tools

MAX_MESSAGES = 4096
MAX_TEMPLATE_KWARGS_CHARACTERS = 16 * 1024


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[MadeCall] | None = None
    function_call: Any = None

    @model_validator(mode="before")
    @classmethod
    def _calls_need_no_content(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("role") == "assistant" and data.get("tool_calls"):
            return data if data.get("content") is not None else {**data, "content": ""}
        return data

    @model_validator(mode="after")
    def _calls_are_the_assistants(self) -> "Message":
        if self.function_call is not None:
            raise PydanticCustomError("unsupported", "function_call is not supported; use tool_calls")
        if self.tool_calls and self.role != "assistant":
            raise PydanticCustomError("calls", "Only messages of the assistant may have tool_calls")
        return self


class Conversation(Body):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    tools: Tools = Field(default_factory=list[Tool])

    @model_validator(mode="after")
    def _ends_in_one_way(self) -> "Conversation":
        if not self.continue_final_message:
            return self
        field = {"field": "continue_final_message"}
        if self.add_generation_prompt:
            raise PydanticCustomError("about_field", "{field} does not go with add_generation_prompt: true", field)
        if self.messages[-1].role != "assistant":
            raise PydanticCustomError("about_field", "{field} needs a final message of the assistant", field)
        return self

    @model_validator(mode="after")
    def _template_kwargs_are_harmless(self) -> "Conversation":
        field = {"field": "chat_template_kwargs"}
        if RESERVED_NAMES & self.chat_template_kwargs.keys():
            raise PydanticCustomError("about_field", "{field} must not set what the endpoint itself sets", field)
        try:
            size = len(json.dumps(self.chat_template_kwargs, allow_nan=False))
        except ValueError as error:
            raise PydanticCustomError("about_field", "{field} must hold finite numbers", field) from error
        if size > MAX_TEMPLATE_KWARGS_CHARACTERS:
            limit = {**field, "max": MAX_TEMPLATE_KWARGS_CHARACTERS}
            raise PydanticCustomError("about_field", "{field} must have at most {max} characters of JSON", limit)
        return self

    @property
    def num_characters(self) -> int:
        return sum(len(message.content) for message in self.messages) + 100 * len(self.tools)

    @property
    def chat_prompt(self) -> ChatPrompt:
        """What the template is to render. Without a word about it the assistant's turn is opened."""
        opens_turn = self.add_generation_prompt
        return ChatPrompt(
            [message.model_dump(exclude_none=True) for message in self.messages],
            add_generation_prompt=not self.continue_final_message if opens_turn is None else opens_turn,
            continue_final_message=self.continue_final_message,
            variables=self.chat_template_kwargs,
            tools=[tool.for_template for tool in self.tools],
        )
