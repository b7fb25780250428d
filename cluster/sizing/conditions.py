"""Whether a recording and a simulation are of the same thing: nothing lost or miscounted, workers as in the profile."""

from collections.abc import Sequence

from ..cost_profile import CostProfile
from .calibrate import fingerprint_of
from .probing import ProbedWorker
from .recording import Recording
from .units import counted

NUM_EXAMPLES = 3  # named in a problem that many requests share


def problems_of(recording: Recording, profile: CostProfile) -> list[str]:
    """Return what makes the recording and the simulation two different things."""
    return [*_lost(recording), *_miscounted(recording), *unlike(recording.header.workers, profile)]


def _lost(recording: Recording) -> list[str]:
    errors = [f"{r.request_id}: {seen.error}" for r in recording.requests for seen in r.runs if seen.error]
    return _examples("failed", errors)


def _miscounted(recording: Recording) -> list[str]:
    """Token counts must be those asked for, and nothing may have happened that the simulator does not know."""
    wrong: list[str] = []
    redone: list[str] = []
    cached: list[str] = []
    for recorded in recording.requests:
        for seen in (seen for seen in recorded.runs if not seen.error):
            name, asked = recorded.request_id, (recorded.num_prompt_tokens, recorded.num_output_tokens)
            counted = (seen.count("num_prompt_tokens"), seen.count("num_output_tokens"))
            if counted != asked or len(seen.token_times_s) != asked[1]:
                wrong.append(f"{name}: {counted}, {len(seen.token_times_s)} of them seen, instead of {asked}")
            if seen.count("num_attempts") != 1:
                redone.append(f"{name}: {seen.count('num_attempts')}")
            if seen.count("num_cached_tokens"):
                cached.append(f"{name}: {seen.count('num_cached_tokens')}")
    return [
        *_examples("had other token counts (prompt, output) than asked for", wrong),
        *_examples("needed more than one attempt: a worker failed", redone),
        *_examples("found prompt tokens cached", cached),
    ]


def unlike(workers: Sequence[ProbedWorker], profile: CostProfile) -> list[str]:
    """Return how the workers differ from those that the profile was measured on."""
    problems: list[str] = []
    for worker in workers:
        assumed = profile.prompt if worker.role == "PROMPT" else profile.completion
        has = {
            **fingerprint_of(worker, profile.fingerprint.num_threads).model_dump(),
            "kv_bytes_per_token": worker.kv_bytes_per_token,
            "num_blocks": worker.num_blocks,
            "block_size_tokens": worker.block_size,
            "max_num_seqs": worker.max_num_seqs,
            "max_num_batched_tokens": worker.max_num_batched_tokens,
        }
        knows = {**profile.fingerprint.model_dump(), **assumed.model_dump()}
        knows["kv_bytes_per_token"] = profile.kv_bytes_per_token
        if worker.role == "COMPLETION":
            del knows["host"]  # a profile names the host of its PROMPT worker
        problems += [
            f"{worker.name} has {key} {has[key]!r}, the cost profile was measured with {value!r}"
            for key, value in knows.items()
            if has[key] != value
        ]
    return problems


def _examples(what: str, cases: Sequence[str]) -> list[str]:
    if not cases:
        return []
    more = ", …" if len(cases) > NUM_EXAMPLES else ""
    return [f"{counted(len(cases), 'request')} {what} ({'; '.join(cases[:NUM_EXAMPLES])}{more})"]
