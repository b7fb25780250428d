"""Text or a conversation to token ids and back, as vLLM's /tokenize and /detokenize say it: no worker is asked.

What /tokenize returns for a prompt is what the completions endpoints would send to the workers for it.
"""

from collections.abc import Sequence
from typing import Any

from ...cluster.protocol.errors import InvalidRequestError
from .conversation import Conversation
from .field_types import Body
from .prepare import ServedModel, check_ids, in_thread_if_long

Json = dict[str, Any]


class TokenizeBody(Body):
    model: str | None = None
    return_token_strs: bool = False


class TokenizeTextBody(TokenizeBody):
    prompt: str
    add_special_tokens: bool = True

    @property
    def num_characters(self) -> int:
        return len(self.prompt)

    def encode(self, model: ServedModel) -> list[int]:
        return model.tokenizer.encode(self.prompt, self.add_special_tokens)


class TokenizeChatBody(Conversation, TokenizeBody):
    def encode(self, model: ServedModel) -> list[int]:
        return model.tokenizer.encode_chat(self.chat_prompt)


class DetokenizeBody(TokenizeBody):
    tokens: list[int]


def tokenize_kind(data: Json) -> type[TokenizeTextBody] | type[TokenizeChatBody]:
    """Return which of the two bodies `data` is to be. Raises InvalidRequestError when it holds both prompts."""
    if data.get("messages") is None:
        return TokenizeTextBody
    if data.get("prompt") is not None:
        raise InvalidRequestError("prompt and messages do not go together.", param="prompt")
    return TokenizeChatBody


async def tokenize(body: TokenizeTextBody | TokenizeChatBody, model: ServedModel) -> Json:
    def work() -> Json:
        tokens = body.encode(model)
        names = [model.tokenizer.token_name(token) for token in tokens] if body.return_token_strs else None
        head = {"count": len(tokens), "max_model_len": model.context_length}
        return head | {"tokens": tokens, "token_strs": names}

    return await in_thread_if_long(body.num_characters, work)


async def detokenize(body: DetokenizeBody, model: ServedModel) -> Json:
    """Return the text with special tokens in it; raises InvalidRequestError for ids that the model does not have."""
    tokens: Sequence[int] = body.tokens
    check_ids("tokens", tokens, model.tokenizer.vocab_size)
    return {"prompt": await in_thread_if_long(len(tokens), lambda: model.tokenizer.decode(tokens))}
