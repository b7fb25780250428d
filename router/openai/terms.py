"""On which terms a request is served: for whom, how urgently, and how long anybody waits for the answer."""

import re
from dataclasses import dataclass, replace

from starlette.requests import Request

from ...cluster.protocol.errors import InvalidRequestError
from ..generation import ANYBODY, Caller
from .prepare import Job
from .requests import SamplingBody

TIMEOUT_HEADER = "x-request-timeout-ms"
MILLISECONDS = re.compile(r"[0-9]{1,9}")
MAX_NAME_CHARACTERS = 64


@dataclass(frozen=True)
class Terms:
    caller: Caller = ANYBODY
    priority: int = 0
    timeout_s: float | None = None

    def put_on(self, job: Job) -> Job:
        """Return `job` with these terms on each of its generations."""
        choices = tuple(
            replace(
                choice,
                request=replace(choice.request, caller=self.caller, priority=self.priority, timeout_s=self.timeout_s),
            )
            if choice.request is not None
            else choice
            for choice in job.choices
        )
        return replace(job, choices=choices)


def terms_of(request: Request, body: SamplingBody) -> Terms:
    """Read the terms of one HTTP request. Raises InvalidRequestError: 400."""
    return Terms(_caller(request, body), body.priority or 0, _timeout_s(request))


def _caller(request: Request, body: SamplingBody) -> Caller:
    """Whoever has a key is known by it; where there are no keys, the client's word is taken for its user."""
    known: Caller = getattr(request.state, "caller", ANYBODY)
    return known if known != ANYBODY or not body.user else Caller(body.user[:MAX_NAME_CHARACTERS])


def _timeout_s(request: Request) -> float | None:
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return None
    if MILLISECONDS.fullmatch(given) is None or int(given) == 0:
        message = f"The header {TIMEOUT_HEADER} must be a whole number of milliseconds, 1 to 999999999."
        raise InvalidRequestError(message, param=TIMEOUT_HEADER, code="invalid_value")
    return int(given) / 1000.0
