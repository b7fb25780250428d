"""What the router tells workers every second: which attempts it still wants. Pure."""

from collections.abc import Iterable

from ..cluster.protocol.identity import WorkerId
from ..cluster.protocol.messages import Renew
from .lifecycle import Lifecycle, Phase, RouterCommand, Send

MAX_REQUESTS_PER_RENEW = 512


def renewals(requests: Iterable[Lifecycle]) -> list[RouterCommand]:
    """Return a Renew for each worker that holds any of `requests`, several where one would be too large."""
    wanted: dict[WorkerId, list[Lifecycle]] = {}
    for lifecycle in requests:
        for worker in lifecycle.holders():
            wanted.setdefault(worker, []).append(lifecycle)
    size = MAX_REQUESTS_PER_RENEW
    return [
        Send(worker, _renew(lifecycles[i : i + size]))
        for worker, lifecycles in wanted.items()
        for i in range(0, len(lifecycles), size)
    ]


def _renew(lifecycles: list[Lifecycle]) -> Renew:
    return Renew(
        requests=tuple(lc.key for lc in lifecycles if lc.phase is not Phase.DECODING),
        prefilled=tuple(lc.key for lc in lifecycles if lc.phase is Phase.DECODING),
    )
