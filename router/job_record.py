"""One request as it ended: what metrics and traces are made of. Times are the router's monotonic clock.

Holds no text of prompt or answer.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from ..cluster.metrics import Timeline
from ..cluster.protocol.messages import SamplingParams

FINISHED = "finished"
CLIENT_LEFT = "client_left"


@dataclass(frozen=True)
class JobRecord:
    """`outcome`: FINISHED, CLIENT_LEFT, or the code of the error. The mappings are by the index of the choice."""

    request_id: str
    endpoint: str
    model: str
    outcome: str
    accepted_s: float
    ended_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    token_times_s: Mapping[int, list[float]]  # when each output token was sent
    timelines: Mapping[int, Timeline]  # of the choices that ended well
    sampling: SamplingParams | None = None  # the first choice's; None: no tokens were asked for
    traceparent: str | None = None  # the header, as it came

    @property
    def is_finished(self) -> bool:
        return self.outcome == FINISHED
