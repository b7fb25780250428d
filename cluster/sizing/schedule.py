"""What the calibrator times on a pair of workers: shapes of passes and sizes of transfers within their limits. Pure."""

from dataclasses import dataclass

from ..costs import Row
from .fit import PassTimes
from .probing import ProbedWorker

SHORTEST_TOKENS = 16
SHORT_CACHE_TOKENS = 64
LONG_CACHE_TOKENS = 1024
CONTROL_PROMPT_TOKENS = 128
SERVED_TOKENS = 384  # about what the passes have in which a busy worker spends its time
CONTROL_SEQUENCES = 4
MIN_TRANSFERS = 4
MAX_KV_SHARE = 0.75  # of a worker's blocks that a decode step reads; no pool serves well when it is fuller


@dataclass(frozen=True)
class PassShape:
    """One kind of pass: prompt chunks, and sequences that decode on so many cached tokens each."""

    chunks: tuple[Row, ...] = ()
    num_sequences: int = 0
    num_cached_each: int = 0

    @property
    def rows(self) -> list[Row]:
        return [*self.chunks, *[(self.num_cached_each, 1)] * self.num_sequences]

    @property
    def num_tokens(self) -> int:
        return sum(new for _, new in self.chunks)

    @property
    def label(self) -> str:
        return self.timed([]).label

    def timed(self, times_s: list[float]) -> PassTimes:
        return PassTimes(self.chunks, self.num_sequences, self.num_sequences * self.num_cached_each, tuple(times_s))


@dataclass(frozen=True)
class Schedule:
    """The shapes to time on one PROMPT and one COMPLETION worker; the controls are timed again and again."""

    prefill: tuple[PassShape, ...]
    decode: tuple[PassShape, ...]
    fused: tuple[PassShape, ...]
    transfer_tokens: tuple[int, ...]
    prefill_control: PassShape
    decode_control: PassShape
    served: PassShape  # timed bare and as a request


def make_schedule(prompt: ProbedWorker, completion: ProbedWorker, is_quick: bool = False) -> Schedule:
    """Return shapes up to the workers' limits; a quick schedule has about half of them."""
    ratio = 4 if is_quick else 2
    longest = min(prompt.max_num_batched_tokens, _max_context(prompt))
    batch = max(1, min(CONTROL_SEQUENCES, _max_batch(completion, SHORT_CACHE_TOKENS)))
    return Schedule(
        prefill=_prefill_shapes(prompt, longest, ratio),
        decode=_decode_shapes(completion, ratio),
        fused=_fused_shapes(completion),
        transfer_tokens=_transfer_sizes(min(longest, _max_context(completion)), ratio),
        prefill_control=PassShape(((0, min(CONTROL_PROMPT_TOKENS, longest)),)),
        served=PassShape(((0, min(SERVED_TOKENS, longest - 1)),)),
        decode_control=PassShape((), batch, min(SHORT_CACHE_TOKENS, _max_context(completion) - 1)),
    )


def _prefill_shapes(worker: ProbedWorker, longest: int, ratio: int) -> tuple[PassShape, ...]:
    """Single prompts of all lengths; chunks after cached context and packed prompts tell n from each kind of n²."""
    shapes = [PassShape(((0, size),)) for size in _falling(longest, SHORTEST_TOKENS, ratio)]
    chunk, context = max(1, longest // 8), _max_context(worker)
    for cached in (chunk, min(longest * 2, context - chunk)):
        if cached >= chunk:
            shapes.append(PassShape(((cached, chunk),)))
    for num_prompts, size in ((2, chunk), (4, chunk), (8, chunk), (8, chunk // 4)):
        if num_prompts <= worker.max_num_seqs and size >= SHORTEST_TOKENS and _fits(worker, size, num_prompts):
            shapes.append(PassShape(((0, size),) * num_prompts))
    return _distinct(shapes)


def _decode_shapes(worker: ProbedWorker, ratio: int) -> tuple[PassShape, ...]:
    """Batches of all sizes, each with short and with long caches; one sequence also with the longest."""
    shapes: list[PassShape] = []
    for batch in _falling(_max_batch(worker, 1), 1, ratio):
        room = _max_cached_each(worker, batch)
        shapes += [PassShape((), batch, min(cached, room)) for cached in (SHORT_CACHE_TOKENS, LONG_CACHE_TOKENS)]
    return _distinct([*shapes, PassShape((), 1, min(4 * LONG_CACHE_TOKENS, _max_cached_each(worker, 1)))])


def _fused_shapes(worker: ProbedWorker) -> tuple[PassShape, ...]:
    """A short and a long chunk, each beside few and many sequences."""
    shapes: list[PassShape] = []
    for batch in (2, min(16, worker.max_num_seqs // 2)):
        budget = min(worker.max_num_batched_tokens - batch, worker.max_model_len)
        for chunk in (min(128, budget), min(256, budget)):
            cached = min(4 * SHORT_CACHE_TOKENS, worker.max_model_len - 1)
            blocks = -(-chunk // worker.block_size) + batch * -(-(cached + 1) // worker.block_size)
            if batch >= 1 and chunk >= SHORTEST_TOKENS and batch < worker.max_num_seqs and blocks <= worker.num_blocks:
                shapes.append(PassShape(((0, chunk),), batch, cached))
    return _distinct(shapes)


def _fits(worker: ProbedWorker, num_tokens: int, num_prompts: int) -> bool:
    return num_prompts * -(-num_tokens // worker.block_size) <= worker.num_blocks


def _transfer_sizes(longest: int, ratio: int) -> tuple[int, ...]:
    smallest = max(1, min(SHORT_CACHE_TOKENS, longest // ratio ** (MIN_TRANSFERS - 1)))
    return tuple(sorted(_falling(longest, smallest, ratio)))


def _falling(largest: int, smallest: int, ratio: int) -> list[int]:
    """Return `largest` and what is left of it after each division, down to `smallest`, which is in it."""
    sizes = [largest]
    while sizes[-1] // ratio > smallest:
        sizes.append(sizes[-1] // ratio)
    return sizes if largest <= smallest else [*sizes, smallest]


def _max_context(worker: ProbedWorker) -> int:
    return min(worker.max_model_len, worker.num_blocks * worker.block_size)


def _max_cached_each(worker: ProbedWorker, batch: int) -> int:
    """Return how many cached tokens each of `batch` sequences gets at most, with room for one more."""
    num_blocks = max(1, int(MAX_KV_SHARE * worker.num_blocks) // batch)
    return min(worker.max_model_len, num_blocks * worker.block_size) - 1


def _max_batch(worker: ProbedWorker, num_cached: int) -> int:
    return min(
        worker.max_num_seqs,
        worker.max_num_batched_tokens,
        worker.num_blocks // -(-(num_cached + 1) // worker.block_size),
    )


def _distinct(shapes: list[PassShape]) -> tuple[PassShape, ...]:
    return tuple(dict.fromkeys(shapes))
