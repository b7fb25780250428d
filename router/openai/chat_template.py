"""Messages to the prompt text, by the chat template that came with the model.

Templates come from the operator's model folder only, never from a client, and run in Jinja's sandbox with the settings
and helpers that such templates are written for. Knows no tokens.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ...cluster.protocol.errors import ConfigError, InvalidRequestError
from .tool_calls import calls_text


class GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}…{% endgeneration %}` marks assistant text for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012  jinja reads it from the class

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


SPECIAL_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
TURN_NAMES = ("messages", "add_generation_prompt", "continue_final_message", "tools", "documents")
HELPER_NAMES = ("raise_exception", "strftime_now")
RESERVED_NAMES = frozenset({*SPECIAL_TOKEN_NAMES, *TURN_NAMES, *HELPER_NAMES})  # never a client's


@dataclass(frozen=True)
class ChatPrompt:
    """What a template renders. `variables`: more of them, by the client's choice; none is a RESERVED_NAME."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False  # the text ends with that message's content, however the template closes it
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])
    tools: Sequence[dict[str, Any]] = ()


class ChatTemplate:
    """`special_tokens` (bos_token, eos_token, …) are variables of the template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        # Templates ask `tools is none`, for which undefined would not do.
        self._variables: dict[str, Any] = {**special_tokens, "documents": None}
        self._variables |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self._knows_developer = "developer" in source
        self._knows_calls = "tool_calls" in source
        try:
            self._template = environment.from_string(source)
            self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template is not valid Jinja: {error}") from error

    def render(self, prompt: ChatPrompt) -> str:
        """Return the prompt text. Raises InvalidRequestError with the template's own sentence when it refuses."""
        if prompt.tools and not self.knows_tools:
            message = "tools are not supported here: the model's chat template knows none."
            raise InvalidRequestError(message, param="tools", code="unsupported_value")
        if not prompt.continue_final_message:
            return self._render(prompt, prompt.messages)
        *before, final = prompt.messages
        end = secrets.token_hex(16)  # what stands behind it is the template's closing
        marked = final | {"content": (final.get("content") or "") + end}
        text, is_found, _ = self._render(prompt, [*before, marked]).rpartition(end)
        if not is_found:
            raise InvalidRequestError("The chat template hides the final message.", param="messages")
        return text

    def _render(self, prompt: ChatPrompt, messages: list[dict[str, Any]]) -> str:
        if not self._knows_developer:
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        if not self._knows_calls:
            messages = [_with_calls_as_text(message) for message in messages]
        own: dict[str, Any] = {"messages": messages, "add_generation_prompt": prompt.add_generation_prompt}
        own["tools"] = list(prompt.tools) or None
        try:
            return self._template.render({**prompt.variables, **self._variables, **own})
        except jinja2.TemplateError as error:
            reason = error.message or "no reason given"
            raise InvalidRequestError(
                f"The chat template refuses these messages: {reason}", param="messages"
            ) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise InvalidRequestError("The chat template cannot render these messages.", param="messages") from error


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its calls in its content, so that a template without a word for them loses none."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return message | {"content": "\n".join(filter(None, [message.get("content"), calls_text(calls)]))}


def find_chat_template(tokenizer_config: Mapping[str, Any], template_file: str | None) -> str | None:
    """Return the template's source: the file chat_template.jinja, else the entry (or its `default`) in the config."""
    if template_file is not None:
        return template_file
    entry = tokenizer_config.get("chat_template")
    if isinstance(entry, list):
        named: dict[str, str] = {str(item["name"]): str(item["template"]) for item in entry}
        return named.get("default")
    return entry if isinstance(entry, str) else None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML; a prompt wants the JSON as it is."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
