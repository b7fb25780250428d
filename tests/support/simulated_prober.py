"""A prober whose workers follow a known cost model, with seeded jitter, slow passes now and then, and a clock."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from twinpool.cluster.costs import CostModel, DecodeCost, Row
from twinpool.cluster.protocol.errors import LaunchError
from twinpool.cluster.sizing.probing import ProbedWorker, RequestTimes

TWO_CORES = CostModel(  # about what the default model does on two cores of a CPU
    prefill_floor_s=0.045,
    prefill_overhead_s=0.030,
    prefill_per_token_s=1.0 / 550,
    prefill_per_token_sq_s=1.5e-7,
    decode=DecodeCost(0.045, 0.0035, 2e-6),
    fuse="roofline",
    transfer_latency_s=0.003,
    transfer_bytes_per_s=1.2e9,
    kv_bytes_per_token=23_040,
    request_overhead_s=0.006,
    prefill_sending=1.2,
    prefill_contention=1.35,
    decode_contention=1.6,
)
PROMPT = ProbedWorker(
    name="prompt-0",
    role="PROMPT",
    host="here",
    model="smollm2",
    fingerprint="f" * 16,
    dtype="bfloat16",
    engine="model",
    kv_bytes_per_token=23_040,
    num_blocks=1456,
    block_size=32,
    max_model_len=8192,
    max_num_batched_tokens=2048,
    max_num_seqs=64,
)
COMPLETION = replace(PROMPT, name="completion-0", role="COMPLETION", max_num_seqs=32)


class SimulatedProber:
    """`slowdown` maps the simulated clock to a factor on everything that is timed then."""

    def __init__(
        self,
        truth: CostModel = TWO_CORES,
        seed: int = 0,
        jitter: float = 0.04,
        slow_share: float = 0.03,
        workers: Sequence[ProbedWorker] = (PROMPT, COMPLETION),
        slowdown: Callable[[float], float] = lambda now_s: 1.0,
        fusing: Sequence[str] = ("prompt-0", "completion-0"),
    ) -> None:
        self.truth = truth
        self.now_s = 0.0
        self.asked: list[tuple[str, tuple[Row, ...]]] = []
        self._random = random.Random(seed)
        self._jitter = jitter
        self._slow_share = slow_share
        self._workers = {worker.name: worker for worker in workers}
        self._slowdown = slowdown
        self._fusing = fusing
        self._num_streams = 0
        self._num_requests = 0  # since gaps were asked for

    def workers(self) -> list[ProbedWorker]:
        return list(self._workers.values())

    def time_passes(self, worker: str, rows: Sequence[Row], num_warmup: int, num_repeats: int) -> list[float]:
        probed = self._workers[worker]
        chunks = [row for row in rows if not (row[0] and row[1] == 1)]
        cached = [row[0] for row in rows if row[0] and row[1] == 1]
        self._check(probed, rows)
        if chunks and cached and worker not in self._fusing:
            raise LaunchError(f"{worker} runs no fused pass")
        self.asked.append((worker, tuple(rows)))
        seconds = self.truth.fused_s(chunks, len(cached), sum(cached))
        return self._times(seconds, num_warmup, num_repeats)

    def time_transfers(self, prompt: str, completion: str, num_tokens: int, num_repeats: int) -> list[float]:
        assert prompt in self._workers
        assert completion in self._workers
        return self._times(self.truth.transfer_s(num_tokens), 0, num_repeats)

    def time_request(self, num_prompt_tokens: int) -> RequestTimes:
        contention = self.truth.prefill_contention if self._num_streams else 1.0
        self._num_requests += 1
        (prefill_s,) = self._times(self.truth.sent_pass_s([(0, num_prompt_tokens)]) * contention, 0, 1)
        (overhead_s,) = self._times(self.truth.request_overhead_s, 0, 1)
        return RequestTimes(0.001 + prefill_s + overhead_s, 0.001, prefill_s)

    @contextmanager
    def streams(self, num_streams: int) -> Iterator["SimulatedProber"]:
        self._num_streams = num_streams
        yield self
        self._num_streams = 0

    def gaps_s(self, min_num: int = 0) -> list[float]:
        """The gaps since the last call are those beside prefills when requests were sent meanwhile."""
        contention = self.truth.decode_contention if self._num_requests else 1.0
        self._num_requests = 0
        step_s = self.truth.decode_s(self._num_streams, 100 * self._num_streams) * contention
        return [gap_s for gap_s in self._times(step_s, 0, max(6, min_num // self._num_streams)) for _ in range(4)]

    def _times(self, seconds: float, num_warmup: int, num_repeats: int) -> list[float]:
        times_s: list[float] = []
        for _ in range(num_warmup + num_repeats):
            times_s.append(seconds * self._noise())
            self.now_s += times_s[-1]
        return times_s[num_warmup:]

    def _noise(self) -> float:
        factor = self._slowdown(self.now_s) * max(0.5, self._random.gauss(1.0, self._jitter))
        if self._random.random() < self._slow_share:
            factor *= 1 + self._random.expovariate(1.0)
        return factor

    def _check(self, worker: ProbedWorker, rows: Sequence[Row]) -> None:
        num_blocks = sum(-(-sum(row) // worker.block_size) for row in rows)
        if (
            not rows
            or min(new for _, new in rows) < 1
            or len(rows) > worker.max_num_seqs
            or sum(new for _, new in rows) > worker.max_num_batched_tokens
            or max(sum(row) for row in rows) > worker.max_model_len
            or num_blocks > worker.num_blocks
        ):
            raise LaunchError(f"{worker.name} has no room for {len(rows)} rows: {list(rows)[:3]} …")
