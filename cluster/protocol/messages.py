"""Every control message between the router and the workers.

They are pydantic models because they come from outside the process: both sides validate, unknown fields are refused.
A message's prompt travels as a raw int32 frame beside it (`token_ids`, see codec.py), never inside the msgpack body.
Durations are seconds measured by one process; no message carries a point in time, because clocks differ.

Directions: a class's `__doc__` opens with the arrow `router → worker` or `worker → router`.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .identity import Role

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Name = Annotated[str, Field(min_length=1, max_length=128)]
FinishReason = Literal["stop", "length"]
TokenCount = Annotated[int, Field(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Field(ge=-100.0, le=100.0)]

ArrivedTokens = Annotated[tuple[TokenCount, ...], Field(max_length=1024)]

MAX_SEQUENCES_PER_MESSAGE = 32  # keeps Tokens below the control channel's limit, log-probabilities included
MAX_SCORES_PER_MESSAGE = 64  # prompt tokens; likewise
MAX_GRAMMAR_CHARACTERS = 12 * 1024  # keeps GrantRequest and Prefill below the limit, whatever the alphabet
PROBE_ATTEMPT = 0  # of everything that is about a probe; the attempts of requests begin at 1


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants", protected_namespaces=())


class Grammar(Message):
    """What the whole output must match. Its state after some output is a function of the tokens alone, so any worker
    can go on from the tokens that it was given (see engine/grammar.py)."""

    kind: Literal["json_schema", "regex", "lark"]
    source: str = Field(min_length=1, max_length=MAX_GRAMMAR_CHARACTERS)


class SamplingParams(Message):
    """How to choose tokens. With `seed` and a position they determine the choice (see engine/sampler.py)."""

    max_tokens: int = Field(default=16, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(default=1.0, ge=0.0, le=2.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, ge=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)  # 0: off
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    presence_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    frequency_penalty: float = Field(default=0.0, ge=-2.0, le=2.0)
    repetition_penalty: float = Field(default=1.0, gt=0.0, le=2.0)
    logit_bias: dict[TokenId, Bias] = Field(default_factory=dict, max_length=300)
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=64)  # end-of-sequence tokens included
    seed: int = Field(default=0, ge=-(2**63), le=2**63 - 1)
    num_logprobs: int | None = Field(default=None, ge=0, le=20)  # None: no log-probabilities at all
    scores_prompt: bool = False  # the prompt's tokens get log-probabilities, too: see PromptScores
    grammar: Grammar | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5 or self.top_k == 1 or self.top_p == 0.0


class SampledToken(Message):
    """One chosen token. `top` holds (token, logprob) of the most likely tokens, best first."""

    token: TokenId
    logprob: float | None = None
    top: tuple[tuple[TokenId, float], ...] = ()


class KVLayoutInfo(Message):
    """What the bytes of a KV row mean. Both sides of a transfer must agree on all of it (I7)."""

    num_layers: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    dtype: Name


class ModelIdentity(Message):
    """What must be equal on every worker of a cluster; `fingerprint` covers config and weights."""

    model: str = Field(min_length=1, max_length=512)
    fingerprint: Name
    dtype: Name
    layout: KVLayoutInfo


class Load(Message):
    """What a worker has to do and how much room it has; everything here is also a metric."""

    num_blocks: int = Field(ge=0)
    num_free_blocks: int = Field(ge=0)
    num_cached_blocks: int = Field(default=0, ge=0)
    num_granted_blocks: int = Field(default=0, ge=0)
    num_queued_tokens: int = Field(default=0, ge=0)  # PROMPT: prompt tokens not yet computed
    num_sequences: int = Field(default=0, ge=0)
    num_transfers: int = Field(default=0, ge=0)
    num_preemptions: int = Field(default=0, ge=0)
    num_dropped_frames: int = Field(default=0, ge=0)  # late, duplicate or corrupt frames, counted since start


class Hello(Message):
    """worker → router: who I am and what I hold. Answered by Welcome or Refused."""

    role: Role
    pid: int
    host: Name
    identity: ModelIdentity
    block_size: int = Field(ge=1)
    num_blocks: int = Field(ge=1)
    max_model_len: int = Field(ge=1)
    max_num_batched_tokens: int = Field(ge=1)
    max_num_seqs: int = Field(ge=1)
    transport: Name = "auto"  # transfer.transport of its spec
    data_addresses: tuple[Annotated[str, Field(max_length=256)], ...] = Field(
        default=(), max_length=4
    )  # COMPLETION: ipc, tcp, and what else it offers (see kvtransfer/transport.py)


class Heartbeat(Message):
    """worker → router, every 0.5 s, from a thread of its own: `progress` moves only when the engine loop does.

    `longest_stretch_s`: processor time that the loop has spent at most between two moves. Time asleep is not in it, so
    that a slow model is told from a loop that hangs.
    """

    progress: int = Field(ge=0)
    is_busy: bool
    longest_stretch_s: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    load: Load


class Granted(Message):
    """worker → router (COMPLETION): blocks are reserved; tokens below `num_cached_tokens` are here already.

    `arrived_tokens`: for each layer, how far an earlier attempt had come whose sender died; none: there was no such.
    """

    request_id: Name
    attempt: int
    generation: int = Field(ge=1)
    credit_bytes: int = Field(ge=1)
    num_cached_tokens: int = Field(default=0, ge=0)
    arrived_tokens: ArrivedTokens = ()
    num_free_blocks: int = Field(ge=0)


class Busy(Message):
    """worker → router (COMPLETION): no room now."""

    request_id: Name
    attempt: int
    num_free_blocks: int = Field(ge=0)


class PrefillStages(Message):
    """Where a PROMPT worker's time went, and how much KV had arrived when the last layer ended."""

    queue_s: float = Field(ge=0.0)
    prefill_s: float = Field(ge=0.0)
    num_computed_tokens: int = Field(ge=0)
    num_kv_bytes: int = Field(ge=0)
    num_kv_bytes_arrived: int = Field(ge=0)


class FirstToken(Message):
    """worker → router (PROMPT): the prefill is done; `finish_reason` set when the request ends right here."""

    request_id: Name
    attempt: int
    position: int = Field(ge=0)  # index among the request's output tokens
    token: SampledToken
    finish_reason: FinishReason | None = None
    stages: PrefillStages


class PromptScores(Message):
    """worker → router (PROMPT): log-probabilities of prompt tokens from index `position` on, before FirstToken.

    The prompt's first token has none, since nothing comes before it: scores begin at index 1.
    """

    request_id: Name
    attempt: int
    position: int = Field(ge=1)
    tokens: tuple[SampledToken, ...] = Field(min_length=1, max_length=MAX_SCORES_PER_MESSAGE)


class DecodeStages(Message):
    """What a COMPLETION worker knows about a sequence when it reports it first."""

    since_last_kv_s: float = Field(ge=0.0)  # last KV byte verified → this message
    prefill: PrefillStages  # as it came with DONE: it counts even when the PROMPT worker's own report is late


class SequenceTokens(Message):
    """New tokens of one sequence; the first report repeats the token that came with DONE, so none can be missed."""

    request_id: Name
    attempt: int
    position: int = Field(ge=0)
    tokens: tuple[SampledToken, ...] = Field(max_length=64)
    finish_reason: FinishReason | None = None
    stages: DecodeStages | None = None


class Tokens(Message):
    """worker → router (COMPLETION): what one decode step produced, all sequences in one message."""

    sequences: tuple[SequenceTokens, ...] = Field(max_length=1024)
    num_free_blocks: int = Field(ge=0)


class Handback(Message):
    """worker → router (COMPLETION): blocks ran out; this sequence was dropped here and is to be resumed later."""

    request_id: Name
    attempt: int
    num_output_tokens: int = Field(ge=0)
    num_free_blocks: int = Field(ge=0)


class Failed(Message):
    """worker → router: this attempt ended here. `is_retryable` is false when another worker would fail as well.

    Why not: it `is_too_long` for this pool, its `remaining_ms` had passed (`is_expired`), else its grammar broke.
    """

    request_id: Name
    attempt: int
    reason: str = Field(max_length=1024)
    is_retryable: bool = True
    is_too_long: bool = False
    is_expired: bool = False


class Unknown(Message):
    """worker → router: of the requests that a Renew named, these are not here."""

    requests: tuple[tuple[Name, int], ...] = Field(max_length=1024)


class PassesTimed(Message):
    """worker → router: the answer to TimePasses, the seconds of each repeat in order."""

    probe_id: Name
    pass_s: tuple[Annotated[float, Field(ge=0.0)], ...] = Field(max_length=1000)


class TransferTimed(Message):
    """worker → router (PROMPT): the answer to TimeTransfer; from the transfer's opening to the receiver's Ack."""

    probe_id: Name
    transfer_s: float = Field(ge=0.0)


class Leaving(Message):
    """worker → router: this process ends now, on purpose; whatever it holds is to go on elsewhere."""


class Welcome(Message):
    """router → worker: accepted. A new `router_incarnation` means that everything granted before is void."""

    router_incarnation: Name


class Refused(Message):
    """router → worker: this worker does not fit the cluster (I7); `reason` names both values."""

    reason: str = Field(max_length=1024)


class Introduce(Message):
    """router → worker: I do not know you (any more); drop everything and say Hello as a new incarnation."""


class GrantRequest(Message):
    """router → worker (COMPLETION): reserve room for this prompt plus one token.

    `resumed_attempt`: its PROMPT worker died, and what this worker has of its KV need not be sent again; 0: none.
    """

    request_id: Name
    attempt: int
    resumed_attempt: int = Field(default=0, ge=0)
    num_output_tokens: int = Field(default=0, ge=0)  # how many of the token ids are output of an earlier attempt
    arrival_order: int = Field(ge=0)  # the larger, the newer: the newest is preempted first
    sampling: SamplingParams
    remaining_ms: int | None = Field(default=None, ge=0)  # until nobody wants the answer any more
    token_ids: tuple[int, ...] = ()


class Prefill(Message):
    """router → worker (PROMPT): compute this prompt and stream its KV to the holder of the grant."""

    request_id: Name
    attempt: int
    num_output_tokens: int = Field(default=0, ge=0)
    sampling: SamplingParams
    generation: int = Field(ge=1)
    credit_bytes: int = Field(ge=1)
    num_cached_tokens: int = Field(default=0, ge=0)
    arrived_tokens: ArrivedTokens = ()
    receiver: Name  # WorkerId of the COMPLETION worker
    receiver_addresses: tuple[Annotated[str, Field(max_length=256)], ...] = Field(max_length=4)
    remaining_ms: int | None = Field(default=None, ge=0)
    token_ids: tuple[int, ...] = ()

    @model_validator(mode="after")
    def _is_cached_of_the_prompt(self) -> "Prefill":
        if self.num_cached_tokens > len(self.token_ids):
            raise ValueError("more tokens are cached than the prompt has")
        return self


class Cancel(Message):
    """router → worker: this attempt is over. `sender_is_active`: a PROMPT worker may still be sending KV for it."""

    request_id: Name
    attempt: int
    sender_is_active: bool = False


class PeerGone(Message):
    """router → worker: that process is dead; nothing of it will arrive any more and nothing reaches it."""

    worker: Name


class Renew(Message):
    """router → worker, every second: I still want these; what I do not name expires with its lease.

    `prefilled`: their first token is known. A transfer of theirs that still runs lives on its own frames alone.
    """

    requests: tuple[tuple[Name, int], ...] = Field(default=(), max_length=1024)
    prefilled: tuple[tuple[Name, int], ...] = Field(default=(), max_length=1024)


class TimePasses(Message):
    """router → worker: run this pass again and again and say how long it takes; an idle worker only.

    A row is (tokens cached before, tokens to compute). Whatever prevents it is answered with Failed. After `limit_s`,
    and when other work comes, the worker gives up.
    """

    probe_id: Name
    rows: tuple[tuple[TokenCount, Annotated[TokenCount, Field(ge=1)]], ...] = Field(min_length=1, max_length=1024)
    num_warmup: int = Field(ge=0, le=100)
    num_repeats: int = Field(ge=1, le=1000)
    limit_s: float = Field(gt=0.0, allow_inf_nan=False)


class TimeTransfer(Message):
    """router → worker (PROMPT): send so many tokens' KV to the holder of this grant, all at once; when idle only."""

    probe_id: Name
    num_tokens: int = Field(ge=1)
    generation: int = Field(ge=1)
    credit_bytes: int = Field(ge=1)
    receiver: Name
    receiver_addresses: tuple[Annotated[str, Field(max_length=256)], ...] = Field(max_length=4)


FromWorker = (
    Hello
    | Heartbeat
    | Granted
    | Busy
    | PromptScores
    | FirstToken
    | Tokens
    | Handback
    | Failed
    | Unknown
    | PassesTimed
    | TransferTimed
    | Leaving
)
FromRouter = (
    Welcome | Refused | Introduce | GrantRequest | Prefill | Cancel | PeerGone | Renew | TimePasses | TimeTransfer
)
