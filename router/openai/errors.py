"""Whatever goes wrong, as the OpenAI error body with its HTTP status; no other shape leaves the router.

Knows no endpoint. Messages are ours (or the chat template's), never the client's body, a class name or a traceback.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ...cluster.protocol.errors import InvalidRequestError, TwinpoolError
from ..generation import FailureCode, GenerationFailed

MAX_MESSAGE_CHARACTERS = 1024
RETRY_AFTER_S = 2

FAILURE_STATUS: dict[FailureCode, int] = {
    "no_worker": 503,
    "queue_full": 503,
    "draining": 503,
    "rate_limited": 429,
    "timeout": 504,
    "worker_failed": 502,
    "too_long": 400,
    "grammar_failed": 400,
    "slow_reader": 408,  # only ever in a stream
}
FAILURE_API_CODE: dict[FailureCode, str] = {
    "too_long": "context_length_exceeded",
    "rate_limited": "rate_limit_exceeded",
}

HTTP_MESSAGES = {
    404: ("There is no such path here.", "not_found"),
    405: ("This path does not take that method.", "method_not_allowed"),
}


class RequestFailedError(TwinpoolError):
    """The dispatching side ended an accepted request with `failure`."""

    def __init__(self, failure: GenerationFailed) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(frozen=True)
class ErrorReply:
    """One answer that is an error; `headers` besides the usual ones."""

    status: int
    message: str
    code: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict[str, str])

    def body(self) -> dict[str, Any]:
        kind = (
            "rate_limit_error"
            if self.status == 429
            else "server_error"
            if self.status >= 500
            else "invalid_request_error"
        )
        message = self.message[:MAX_MESSAGE_CHARACTERS]
        return {"error": {"message": message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, headers=self.headers)


OnError = Callable[[str, ErrorReply], None]  # is told the path of a request and the error that answered it

INTERNAL_ERROR = ErrorReply(500, "The router failed on this request; its log has the reason.", "internal_error")


def reply_of(error: Exception) -> ErrorReply:
    """Return the answer to `error`; anything unforeseen is a 500 without details."""
    if isinstance(error, InvalidRequestError):
        headers = {"connection": "close"} if error.status in (408, 413) else {}
        return ErrorReply(error.status, error.message, error.code, error.param, headers)
    if isinstance(error, RequestFailedError):
        return reply_of_failure(error.failure)
    if isinstance(error, HTTPException):
        message, code = HTTP_MESSAGES.get(error.status_code, ("This request cannot be served.", "invalid_request"))
        return ErrorReply(error.status_code, message, code, headers=dict(error.headers or {}))
    return INTERNAL_ERROR


def reply_of_failure(failure: GenerationFailed) -> ErrorReply:
    """Return the answer to a request that the dispatching side refused or lost."""
    status = FAILURE_STATUS[failure.code]
    after_s = RETRY_AFTER_S if failure.retry_after_s is None else math.ceil(failure.retry_after_s)
    headers = {"retry-after": str(max(1, after_s))} if status in (429, 503) else {}
    return ErrorReply(status, failure.message, FAILURE_API_CODE.get(failure.code, failure.code), headers=headers)
