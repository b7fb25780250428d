"""The clock, the network and the faults of a simulated run; everything random comes from one seed."""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Faults:
    """How unfriendly this run is."""

    loss: float = 0.0
    duplication: float = 0.0
    reordering: float = 0.0
    corruption: float = 0.0  # payloads with a flipped bit, or cut short
    max_delay_s: float = 0.002
    num_crashes: int = 0
    num_pauses: int = 0  # of a worker's whole process
    num_hangs: int = 0  # of a worker's loop alone: its heartbeats go on
    num_partitions: int = 0  # half of them in one direction only
    num_slow_links: int = 0
    num_router_crashes: int = 0
    num_router_pauses: int = 0
    have_deadlines: bool = False  # some requests are wanted for a moment only

    @staticmethod
    def random(rng: random.Random) -> "Faults":
        def some(most: float) -> float:
            return rng.choice([0.0, 0.0, most * rng.random()])

        return Faults(
            loss=some(0.03),
            duplication=some(0.05),
            reordering=some(0.05),
            corruption=some(0.03),
            max_delay_s=rng.choice([0.002, 0.02, 0.3]),
            num_crashes=rng.choice([0, 0, 1, 2, 4]),
            num_pauses=rng.choice([0, 0, 1, 3]),
            num_hangs=rng.choice([0, 0, 0, 1]),
            num_partitions=rng.choice([0, 0, 1, 3]),
            num_slow_links=rng.choice([0, 0, 1, 3]),
            num_router_crashes=rng.choice([0, 0, 0, 1]),
            num_router_pauses=rng.choice([0, 0, 0, 1]),
            have_deadlines=True,
        )


class Simulation:
    """A clock, a heap of things to come, one source of randomness, and the network."""

    def __init__(self, seed: int, faults: Faults) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.now = 0.0
        self.healed_s = 20.0  # no fault begins after this
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._num_events = 0
        self._last_arrival_s: dict[tuple[str, str], float] = {}
        self._cut_until_s: dict[tuple[str, str], float] = {}
        self._slow: dict[tuple[str, str], tuple[float, float]] = {}  # until when, and by how much

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        self._num_events += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._num_events, action))

    def run(self, until_s: float, after_event: Callable[[], None]) -> None:
        while self._heap and self._heap[0][0] <= until_s:
            self.now, _, action = heapq.heappop(self._heap)
            action()
            after_event()
        self.now = until_s

    def send(self, source: str, target: str, deliver: Callable[[], None]) -> None:
        """Deliver later, in order for each pair of ends, unless a fault eats it or holds it back."""
        is_faulty, faults = self.now < self.healed_s, self.faults
        ends = (source.split("/")[0], target.split("/")[0])
        if self.now < self._cut_until_s.get(ends, 0.0):
            return
        if is_faulty and self.rng.random() < faults.loss:
            return
        slow_until_s, slow_s = self._slow.get(ends, (0.0, 0.0))
        least_s = self.now + 0.0002 + (slow_s if self.now < slow_until_s else 0.0)
        copies = 2 if is_faulty and self.rng.random() < faults.duplication else 1
        for _ in range(copies):
            arrival_s = least_s + self.rng.random() * (faults.max_delay_s if is_faulty else 0.002)
            if is_faulty and self.rng.random() < faults.reordering:
                self.at(arrival_s + self.rng.random() * 0.1, deliver)  # what is sent behind it may overtake it
                continue
            arrival_s = max(arrival_s, self._last_arrival_s.get((source, target), 0.0))
            self._last_arrival_s[source, target] = arrival_s
            self.at(arrival_s, deliver)

    def cut(self, source: str, target: str, duration_s: float) -> None:
        """Lose everything that `source` sends to `target`; the other way stays open."""
        self._cut_until_s[source, target] = self.now + duration_s

    def slow_down(self, source: str, target: str, duration_s: float, by_s: float) -> None:
        self._slow[source, target] = (self.now + duration_s, by_s)
