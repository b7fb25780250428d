"""What every route of the public application needs: the model it serves, and through whom."""

from dataclasses import dataclass

from ..cluster.protocol.errors import InvalidRequestError
from .generation import Backend
from .metrics import Metrics
from .openai.answer import KEEP_ALIVE_S
from .openai.prepare import ServedModel
from .openai.structured import GrammarCheck
from .openai.tokenizer import ChatTokenizer
from .tracing import Traces


@dataclass(frozen=True)
class Serving:
    backend: Backend
    tokenizer: ChatTokenizer
    model_name: str
    metrics: Metrics
    grammars: GrammarCheck
    keep_alive_s: float = KEEP_ALIVE_S
    traces: Traces | None = None

    @property
    def context_length(self) -> int | None:
        return self.backend.max_model_len or self.tokenizer.context_length

    def model(self, asked: str | None) -> ServedModel:
        """Return the model by the name that a client gave, if any. Raises InvalidRequestError: 404."""
        if asked is not None and asked != self.model_name:
            raise InvalidRequestError(
                f"There is no such model here; this cluster serves {self.model_name!r}.",
                param="model",
                code="model_not_found",
                status=404,
            )
        return ServedModel(self.model_name, self.tokenizer, self.context_length, self.grammars)
