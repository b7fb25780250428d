"""The model's tokenizer as the endpoint needs it: text and messages to ids, a token to its bytes, what ends an answer.

Read from a Hugging Face folder with the `tokenizers` library alone; neither torch nor transformers is imported, so the
router starts at once. Knows no requests.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ...cluster.protocol.errors import ConfigError, InvalidRequestError
from ...engine.grammar import Grammars
from .chat_template import SPECIAL_TOKEN_NAMES, ChatPrompt, ChatTemplate, find_chat_template
from .token_bounds import bound_of
from .tool_calls import ToolFormat, find_tool_format


@dataclass(frozen=True)
class ChatSettings:
    """What an operator may set apart from what the model's folder says."""

    chat_template: Path | None = None
    tool_format: ToolFormat | None = None  # None: what the template's text suggests
    knows_grammars: bool = True


@dataclass(frozen=True)
class TokenLimit:
    """What a prompt must not exceed, and the parameter it came in."""

    num_tokens: int
    param: str


class ChatTokenizer:
    """Everything about tokens and prompts; safe to use from several threads.

    `vocab_size` bounds the ids that may go to an engine (its embedding rows); `context_length` is what the model's
    config allows, None when it does not say. `grammars` is None when answers cannot be held to one,
    `tool_format` when the template knows no tools or asks for calls in no format known here.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: dict[str, Any],
        eos_ids: frozenset[int],
        template: ChatTemplate | None,
        grammars: Grammars | None,
        tool_format: ToolFormat | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._token_bytes: dict[int, bytes] = {}
        self._special_ids = frozenset(id for id, added in tokenizer.get_added_tokens_decoder().items() if added.special)
        self._is_byte_level = _is_byte_level(tokenizer)
        self._byte_of_character = _byte_of_character()
        self._bound = bound_of(tokenizer, self._byte_of_character) if self._is_byte_level else None
        prefix = list(tokenizer.encode("", add_special_tokens=True).ids)
        self._bos_id = prefix[0] if prefix and prefix[0] in self._special_ids else None
        self.eos_ids = eos_ids
        self.grammars = grammars
        self.tool_format: ToolFormat | None = tool_format if template is not None and template.knows_tools else None
        self.vocab_size: int = config.get("vocab_size") or tokenizer.get_vocab_size(with_added_tokens=True)
        self.context_length: int | None = config.get("max_position_embeddings")

    @staticmethod
    def load(model_folder: Path, settings: ChatSettings | None = None) -> "ChatTokenizer":
        """Read the folder. Raises ConfigError naming the file that is missing or wrong."""
        settings = settings or ChatSettings()
        path = model_folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{model_folder} has no tokenizer.json", hint="slow tokenizers have to be converted first"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise ConfigError(f"{path} cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer_config = _read_json(model_folder / "tokenizer_config.json")
        names = _read_json(model_folder / "special_tokens_map.json") | tokenizer_config
        special_tokens = {name: _content(names[name]) for name in SPECIAL_TOKEN_NAMES if names.get(name)}
        source = find_chat_template(tokenizer_config, _template_file(model_folder, settings.chat_template))
        config = _read_json(model_folder / "config.json")
        eos_ids = _find_eos_ids(model_folder, config, tokenizer, special_tokens.get("eos_token"))
        return ChatTokenizer(
            tokenizer,
            config.get("text_config", config),
            eos_ids,
            None if source is None else ChatTemplate(source, special_tokens),
            Grammars.load(model_folder) if settings.knows_grammars and eos_ids else None,
            settings.tool_format or find_tool_format(source or ""),
        )

    def encode(self, text: str, add_special_tokens: bool = True, limit: TokenLimit | None = None) -> list[int]:
        """Return the ids of a plain prompt, with one BOS where the tokenizer has one.

        Raises InvalidRequestError, without having tokenised it, when the text must have more tokens than `limit`.
        """
        if limit is not None:
            self._check_length(text, limit)
        # The batch call, unlike `encode`, lets other threads run meanwhile, and this one computes no offsets.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        if self._bos_id is not None and ids[:2] == [self._bos_id, self._bos_id]:
            return ids[1:]
        return ids

    def encode_chat(self, prompt: ChatPrompt, limit: TokenLimit | None = None) -> list[int]:
        """Return the ids of the rendered messages; the template writes the BOS, so none is added here."""
        if self._template is None:
            raise InvalidRequestError("This model has no chat template; use /v1/completions.", param="messages")
        return self.encode(self._template.render(prompt), add_special_tokens=False, limit=limit)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that the token stands for, maybe a part of a character; of a special token its name."""
        known = self._token_bytes.get(token)
        if known is None:
            known = self._token_bytes[token] = self._find_bytes(token)
        return known

    def token_name(self, token: int) -> str:
        """Return what the vocabulary calls the token; empty beyond the vocabulary."""
        return self._tokenizer.id_to_token(token) or ""

    def is_special(self, token: int) -> bool:
        return token in self._special_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of a prompt given as ids, special tokens included."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def _check_length(self, text: str, limit: TokenLimit) -> None:
        fewest = 0 if self._bound is None else self._bound.fewest_tokens(text)
        if fewest > limit.num_tokens:
            raise InvalidRequestError(
                f"This model's context is {limit.num_tokens} tokens, for prompt and output together; "
                f"the prompt has {len(text)} characters, which are at least {fewest} tokens.",
                param=limit.param,
                code="context_length_exceeded",
            )

    def _find_bytes(self, token: int) -> bytes:
        name: str | None = self._tokenizer.id_to_token(token)
        if name is None:  # embedding rows beyond the vocabulary
            return b""
        if token in self._special_ids:
            return name.encode()
        if self._is_byte_level:
            mapped = [self._byte_of_character.get(character) for character in name]
            # An added token is written as plain text; one character outside the byte alphabet shows it.
            return name.encode() if None in mapped else bytes(byte for byte in mapped if byte is not None)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace("▁", " ").encode()


def _template_file(model_folder: Path, of_operator: Path | None) -> str | None:
    path = of_operator or model_folder / "chat_template.jinja"
    try:
        return path.read_text() if of_operator is not None or path.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error}") from error


def _is_byte_level(tokenizer: Tokenizer) -> bool:
    """True for GPT-2's byte alphabet, False for SentencePiece's; raises ConfigError for any other decoder."""
    decoder: Any = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    kinds = {part["type"] for part in [decoder, *decoder.get("decoders", [])] if "type" in part}
    if "ByteLevel" in kinds:
        return True
    if kinds & {"ByteFallback", "Metaspace"}:
        return False
    raise ConfigError(f"tokenizer.json has the decoder {sorted(kinds)}; served are ByteLevel, ByteFallback, Metaspace")


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's byte alphabet: printable Latin-1 stands for itself, the others for 256, 257, … in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _find_eos_ids(folder: Path, config: dict[str, Any], tokenizer: Tokenizer, eos_token: str | None) -> frozenset[int]:
    """What `generate` of transformers stops at: generation_config.json, else config.json, else the tokenizer's own."""
    for source in (_read_json(folder / "generation_config.json"), config, config.get("text_config") or {}):
        ids = source.get("eos_token_id")
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    own: int | None = tokenizer.token_to_id(eos_token) if eos_token else None
    return frozenset() if own is None else frozenset([own])


def _content(token: Any) -> str:
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = json.loads(path.read_text())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return data
