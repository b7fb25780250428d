"""A validated body to a job: prompts tokenised, limits checked, one generation request for each choice.

Last step before the dispatching side. Everything that a worker could refuse is refused here.
"""

import asyncio
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ...cluster.protocol.errors import InvalidRequestError
from ...cluster.protocol.messages import Grammar, SamplingParams
from ..generation import GenerationRequest
from .field_types import Prompt
from .requests import ChatBody, CompletionBody, StreamOptions
from .structured import GrammarCheck, Structured
from .tokenizer import ChatTokenizer, TokenLimit
from .tool_calls import ExpectedCalls
from .tools import ToolChoice, expect_calls

DEFAULT_COMPLETION_TOKENS = 16
# Longer texts are tokenised in a thread: these take a millisecond, in which no stream moves.
MAX_INLINE_CHARACTERS = 4096
MAX_SCORES = 1024 * 1024  # of a request's prompts, alternatives included: they take some hundred MB here
T = TypeVar("T")


@dataclass(frozen=True)
class ServedModel:
    """The model behind the endpoint. `context_length` bounds prompt and output together; None: nobody knows yet."""

    name: str
    tokenizer: ChatTokenizer
    context_length: int | None
    grammars: GrammarCheck


@dataclass(frozen=True)
class Choice:
    """One answer to generate. `request` is None when the client asked for no tokens at all."""

    index: int
    request: GenerationRequest | None
    echo: str = ""  # comes before the generated text
    hides_output: bool = False  # only the prompt's scores were asked for: the one token that comes with them is dropped
    text_offset: int = 0  # characters of the prompt, for the completions endpoint's text_offset


@dataclass(frozen=True)
class Job:
    """One HTTP request, ready to run."""

    request_id: str
    model: str
    is_chat: bool
    choices: tuple[Choice, ...]
    num_prompt_tokens: int  # each prompt once, however many choices it has
    num_choices_per_prompt: int  # that run; best_of may ask for more than are returned
    num_returned_per_prompt: int
    stop: tuple[str, ...]
    includes_stop: bool  # the text ends with the stop string or stop token that ended it
    skip_special_tokens: bool
    num_logprobs: int | None
    stream: bool
    include_usage: bool
    include_usage_in_chunks: bool
    include_timing: bool
    return_token_ids: bool
    calls: ExpectedCalls | None = None


@dataclass(frozen=True)
class PromptTokens:
    token_ids: tuple[int, ...]
    echo: str = ""
    num_characters: int = 0


async def prepare_chat(body: ChatBody, model: ServedModel, request_id: str) -> Job:
    """Render and tokenise the messages; raises InvalidRequestError."""
    calls, structure = _expect_calls(body, model)
    grammar = await _checked(structure, model)
    limit = _limit(model, "messages")
    ids = await in_thread_if_long(body.num_characters, lambda: model.tokenizer.encode_chat(body.chat_prompt, limit))
    is_continued = body.echo and body.continue_final_message
    prompt = PromptTokens(tuple(ids), body.messages[-1].content if is_continued else "")
    return replace(_job(body, [prompt], model, request_id, grammar), calls=calls)


def _expect_calls(body: ChatBody, model: ServedModel) -> tuple[ExpectedCalls | None, Structured | None]:
    """Return the calls to look for, and the structure of the answer: prescribed as such, or by a call that must be."""
    structure = body.structure
    if not body.offers_tools:
        return None, structure
    if structure is not None:
        message = f"{structure.param} goes with tools only where tool_choice is none."
        raise InvalidRequestError(message, param=structure.param, code="unsupported_value")
    choice = body.tool_choice or ToolChoice("auto")
    return expect_calls(body.tools, choice, body.parallel_tool_calls, model.tokenizer.tool_format)


async def prepare_completion(body: CompletionBody, model: ServedModel, request_id: str) -> Job:
    """Tokenise the prompts; raises InvalidRequestError."""
    num_characters = sum(map(len, body.prompt))

    def encode() -> list[PromptTokens]:
        return [_encode_prompt(body, prompt, model) for prompt in body.prompt]

    grammar = await _checked(body.structure, model)
    return _job(body, await in_thread_if_long(num_characters, encode), model, request_id, grammar)


async def _checked(asked: Structured | None, model: ServedModel) -> Grammar | None:
    if asked is None:
        return None
    await model.grammars.check(asked)
    return asked.grammar


def _encode_prompt(body: CompletionBody, prompt: Prompt, model: ServedModel) -> PromptTokens:
    tokenizer = model.tokenizer
    if isinstance(prompt, str):
        ids = tokenizer.encode(prompt, body.add_special_tokens, _limit(model, "prompt"))
        return PromptTokens(tuple(ids), prompt if body.echo else "", len(prompt))
    check_ids("prompt", prompt, tokenizer.vocab_size)
    needs_text = body.echo or body.logprobs is not None
    text = tokenizer.decode(prompt) if needs_text else ""
    return PromptTokens(prompt, text if body.echo else "", len(text))


def _limit(model: ServedModel, param: str) -> TokenLimit | None:
    return None if model.context_length is None else TokenLimit(model.context_length, param)


async def in_thread_if_long(num_characters: int, work: Callable[[], T]) -> T:
    """Return what `work` returns, which takes time in proportion to so many characters or tokens."""
    return work() if num_characters <= MAX_INLINE_CHARACTERS else await asyncio.to_thread(work)


def _job(
    body: ChatBody | CompletionBody,
    prompts: Sequence[PromptTokens],
    model: ServedModel,
    request_id: str,
    grammar: Grammar | None,
) -> Job:
    check_ids("stop_token_ids", body.stop_token_ids, model.tokenizer.vocab_size)
    check_ids("logit_bias", [int(token) for token in body.logit_bias], model.tokenizer.vocab_size)
    _check_scores(body, sum(len(prompt.token_ids) for prompt in prompts))
    choices: list[Choice] = []
    options = body.stream_options or StreamOptions()
    for prompt in prompts:
        max_tokens = _max_tokens(body, len(prompt.token_ids), model.context_length)
        for j in range(body.num_candidates):
            index = len(choices)
            name = request_id if len(prompts) * body.num_candidates == 1 else f"{request_id}-{index}"
            is_wanted = max_tokens > 0 or body.scores_prompt
            sampling = _sampling(body, max_tokens, j, model.tokenizer.eos_ids, grammar) if is_wanted else None
            request = GenerationRequest(name, prompt.token_ids, sampling) if sampling else None
            hides_output = request is not None and max_tokens == 0
            choices.append(Choice(index, request, prompt.echo, hides_output, prompt.num_characters))
    return Job(
        request_id=request_id,
        model=model.name,
        is_chat=isinstance(body, ChatBody),
        choices=tuple(choices),
        num_prompt_tokens=sum(len(prompt.token_ids) for prompt in prompts),
        num_choices_per_prompt=body.num_candidates,
        num_returned_per_prompt=body.n,
        stop=body.stop,
        includes_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        num_logprobs=body.num_logprobs,
        stream=body.stream,
        include_usage=options.include_usage,
        include_usage_in_chunks=options.include_usage and options.continuous_usage_stats,
        include_timing=body.timing,
        return_token_ids=body.return_token_ids,
    )


def _max_tokens(body: ChatBody | CompletionBody, num_prompt_tokens: int, context_length: int | None) -> int:
    """Return how many tokens may come: what was left open is cut to the room there is, what was asked is not."""
    prompt_field = "messages" if isinstance(body, ChatBody) else "prompt"
    if num_prompt_tokens == 0:
        raise InvalidRequestError("The prompt is empty, and this model has no token to start from.", param=prompt_field)
    asked = body.output_limit
    default = None if isinstance(body, ChatBody) else DEFAULT_COMPLETION_TOKENS
    if context_length is None:
        max_tokens = asked if asked is not None else default or DEFAULT_COMPLETION_TOKENS
    else:
        room = context_length - num_prompt_tokens
        if (asked is None and room < 1) or (asked is not None and asked > room):
            shown = f"max_tokens is {asked}" if asked is not None else "max_tokens is not set"
            raise InvalidRequestError(
                f"This model's context is {context_length} tokens, for prompt and output together; "
                f"the prompt has {num_prompt_tokens} tokens and {shown}.",
                param=prompt_field,
                code="context_length_exceeded",
            )
        max_tokens = asked if asked is not None else room if default is None else min(default, room)
    if body.min_tokens > max_tokens:
        message = f"min_tokens is {body.min_tokens}, above max_tokens, which is {max_tokens}."
        raise InvalidRequestError(message, param="min_tokens")
    return max_tokens


def _sampling(
    body: ChatBody | CompletionBody, max_tokens: int, j: int, eos_ids: frozenset[int], grammar: Grammar | None
) -> SamplingParams:
    """Return the parameters of choice `j` of a prompt: its seed is the client's plus j, or a fresh one."""
    seed = secrets.randbits(63) if body.seed is None else _wrap_int64(body.seed + j)
    goes_on = body.ignore_eos and grammar is None  # a grammar that is complete needs a way to end
    stop_token_ids = frozenset(body.stop_token_ids) | (frozenset() if goes_on else eos_ids)
    return SamplingParams(
        max_tokens=max(max_tokens, 1),
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias={int(token): bias for token, bias in body.logit_bias.items()},
        stop_token_ids=tuple(sorted(stop_token_ids)),
        seed=seed,
        num_logprobs=0 if body.num_logprobs is None and body.num_candidates > body.n else body.num_logprobs,
        scores_prompt=body.scores_prompt,
        grammar=grammar,
    )


def _wrap_int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def check_ids(param: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raise InvalidRequestError that names `param` for ids that the model does not have."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        raise InvalidRequestError(f"{param}: token ids must lie in 0 to {vocab_size - 1}.", param=param)


def _check_scores(body: ChatBody | CompletionBody, num_prompt_tokens: int) -> None:
    num_scores = num_prompt_tokens * body.num_candidates * (1 + (body.num_logprobs or 0))
    if body.scores_prompt and num_scores > MAX_SCORES:
        message = f"The prompts would have {num_scores} log-probabilities; a request may have {MAX_SCORES}."
        raise InvalidRequestError(f"{message} Send fewer prompts at once, or ask for fewer logprobs.", param="logprobs")
