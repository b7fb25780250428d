"""Workers that share one host slow each other down: decode steps while a prefill runs, and the other way round."""

from typing import Protocol

from ..costs import CostModel


class Disturbed(Protocol):
    def disturbed(self) -> None:
        """The other kind of work has begun or stopped on the host."""
        ...


class Host:
    """Counts the workers that compute. A host whose workers do not disturb each other has both factors at 1."""

    def __init__(self, cost: CostModel, is_shared: bool) -> None:
        self._prefill_factor = cost.prefill_contention if is_shared else 1.0
        self._decode_factor = cost.decode_contention if is_shared else 1.0
        self._num_prefilling = 0
        self._num_decoding = 0
        self.prompt_workers: list[Disturbed] = []
        self.completion_workers: list[Disturbed] = []

    @property
    def prefill_factor(self) -> float:
        return self._prefill_factor if self._num_decoding else 1.0

    @property
    def decode_factor(self) -> float:
        return self._decode_factor if self._num_prefilling else 1.0

    def prefilling_changed(self, is_busy: bool) -> None:
        before, self._num_prefilling = self._num_prefilling, self._num_prefilling + (1 if is_busy else -1)
        if self._decode_factor != 1.0 and not (before and self._num_prefilling):
            for worker in self.completion_workers:
                worker.disturbed()

    def decoding_changed(self, is_busy: bool) -> None:
        before, self._num_decoding = self._num_decoding, self._num_decoding + (1 if is_busy else -1)
        if self._prefill_factor != 1.0 and not (before and self._num_decoding):
            for worker in self.prompt_workers:
                worker.disturbed()
