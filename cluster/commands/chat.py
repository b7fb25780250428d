"""`twinpool chat`: one question to a running cluster, over the same HTTP endpoint that every client uses."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from ..client_key import KEY_HINT, key_headers
from ..protocol.errors import LaunchError

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Question:
    prompt: str
    system: str | None = None
    max_tokens: int = 256
    temperature: float = 0.0
    wants_timing: bool = False

    def body(self, model: str) -> dict[str, Any]:
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.prompt})
        body = {"model": model, "messages": messages, "max_tokens": self.max_tokens, "temperature": self.temperature}
        return {**body, "stream": True, **({"timing": True} if self.wants_timing else {})}


@dataclass
class Answer:
    text: str = ""
    timing: dict[str, Any] | None = None
    finish_reason: str | None = None
    pieces: list[str] = field(default_factory=list[str])


def ask_question(endpoint: str, model: str, question: Question, show: Callable[[str], None]) -> Answer:
    """Stream the answer, each piece to `show` as it comes. Raises LaunchError with what the endpoint said."""
    answer = Answer()
    for chunk in _chunks(f"{endpoint}/v1/chat/completions", question.body(model)):
        if "error" in chunk:
            raise LaunchError(f"the cluster could not answer: {_error_message(chunk)}")
        answer.timing = chunk.get("timing") or answer.timing
        for choice in chunk.get("choices", []):
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            piece = choice.get("delta", {}).get("content")
            if piece:
                answer.pieces.append(piece)
                show(piece)
    answer.text = "".join(answer.pieces)
    return answer


def _chunks(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the stream's JSON chunks; an answer that is an error raises."""
    import httpx  # only this command needs it, and it would cost the others 0.2 s

    try:
        with httpx.stream(
            "POST", url, json=body, headers=key_headers(), timeout=TIMEOUT_S, trust_env=False
        ) as response:
            if response.status_code != 200:
                response.read()
                said = f"the endpoint refused this ({response.status_code}): {_said(response.text)}"
                raise LaunchError(said, hint=KEY_HINT if response.status_code == 401 else None)
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    yield json.loads(data)
    except httpx.HTTPError as error:
        raise LaunchError(f"the endpoint {url} failed: {error}", hint="`twinpool status` shows who is up") from error


def _said(text: str) -> str:
    try:
        return _error_message(json.loads(text))
    except ValueError:
        return text[:500]


def _error_message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None  # pyright: ignore[reportUnknownMemberType]
    return str(error.get("message", error)) if isinstance(error, dict) else str(error or body)
