"""Links between simulated workers: the KV of one prompt at a time from each PROMPT to each COMPLETION worker.

`after`: the KV leaves as a whole when its prefill has ended (or the link is free), and takes latency + bytes/bandwidth.
`streamed`: it leaves chunk by chunk from the first pass on. It has arrived when all its bytes had the time to pass, but
not before its last frame has: the prefill's end, the latency, and that frame (what short prompts are joined to). The
prompts of one pass to one receiver travel interleaved and arrive together. A link is busy while bytes pass, not while
it waits for the next layer; its bar is drawn at the end of that time.
"""

from dataclasses import dataclass

from ..config import TransferSpec
from .clock import instant
from .result import Bar
from .world import Job, World


@dataclass(frozen=True, slots=True)
class Parcel:
    """The KV of one prompt; `last_tokens` were computed in the pass that just ended."""

    job: Job
    num_tokens: int
    last_tokens: int


class Links:
    def __init__(self, world: World) -> None:
        self._world = world
        self._frame_bytes = TransferSpec().min_frame_bytes
        self._free_s: dict[tuple[str, str], float] = {}

    def send(self, parcels: list[Parcel]) -> list[tuple[float, list[Job]]]:
        """Account for what a pass that ends now has completed on one worker; return who arrives when."""
        arrivals: list[tuple[float, list[Job]]] = []
        by_receiver: dict[str, list[Parcel]] = {}
        for parcel in parcels:
            by_receiver.setdefault(parcel.job.completion_worker, []).append(parcel)
        for together in by_receiver.values():
            if self._world.rules.transfer == "after":
                arrivals += [(self._after(parcel), [parcel.job]) for parcel in together]
            else:
                arrivals.append((self._streamed(together), [parcel.job for parcel in together]))
        return arrivals

    def _after(self, parcel: Parcel) -> float:
        link = _link(parcel)
        start_s = max(self._world.clock.now, self._free_s.get(link, 0.0))
        self._free_s[link] = instant(start_s + self._world.cost.transfer_s(parcel.num_tokens))
        self._occupy([parcel], start_s, self._free_s[link])
        return self._free_s[link]

    def _streamed(self, parcels: list[Parcel]) -> float:
        cost, link = self._world.cost, _link(parcels[0])
        sent_s = self._free_s.get(link, 0.0) + cost.transfer_latency_s
        for parcel in sorted(parcels, key=lambda p: (p.job.started_s or 0.0, p.job.arrival_order)):
            assert parcel.job.started_s is not None
            sent_s = max(sent_s, parcel.job.started_s + cost.transfer_latency_s) + self._bytes_s(parcel.num_tokens)
        tail_bytes = min(self._frame_bytes, max(p.last_tokens for p in parcels) * cost.kv_bytes_per_token)
        tail_s = cost.transfer_latency_s + tail_bytes / cost.transfer_bytes_per_s
        arrival_s = self._free_s[link] = instant(max(sent_s, self._world.clock.now + tail_s))
        busy_s = cost.transfer_latency_s + sum(self._bytes_s(parcel.num_tokens) for parcel in parcels)
        self._occupy(parcels, arrival_s - busy_s, arrival_s)
        return arrival_s

    def _bytes_s(self, num_tokens: int) -> float:
        return num_tokens * self._world.cost.kv_bytes_per_token / self._world.cost.transfer_bytes_per_s

    def _occupy(self, parcels: list[Parcel], start_s: float, end_s: float) -> None:
        if end_s > start_s:
            ids = tuple(parcel.job.request.request_id for parcel in parcels)
            self._world.ledger.occupy(Bar("→".join(_link(parcels[0])), "transfer", start_s, end_s, 1, 0, 0, ids))


def _link(parcel: Parcel) -> tuple[str, str]:
    return parcel.job.prompt_worker, parcel.job.completion_worker
