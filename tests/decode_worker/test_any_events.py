"""A COMPLETION worker's core under any order of events: grants, frames, steps, cancels, renewals, failures and time.

Each grant has a generation and a lease of its own, ends at most once in the router's ears, and its blocks come home
whoever falls silent. See also tests/kvtransfer/test_protocol.py, for the transfers, and tests/simulation.
"""

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from state_machines import LONG, LONG_S, SHORT
from twinpool.cluster.protocol.messages import (
    Busy,
    Cancel,
    Failed,
    Granted,
    GrantRequest,
    Handback,
    PrefillStages,
    Renew,
    SampledToken,
    SamplingParams,
    Tokens,
    Unknown,
)
from twinpool.decode_worker.core import CompletionCommand, CompletionCore, CompletionLimits, ToRouter, ToSender, WriteKV
from twinpool.engine.block_pool import Owner
from twinpool.kvtransfer.frames import Ack, Cancelled, Done, KVFrame, extend_digest
from twinpool.kvtransfer.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32")
LEASE_S = 5.0
LIMITS = CompletionLimits(
    block_size=2,
    num_blocks=12,
    max_model_len=18,
    max_num_batched_tokens=3,
    max_num_seqs=4,
    credit_bytes=1000,
    lease_s=LEASE_S,
)
STAGES = PrefillStages(queue_s=0, prefill_s=1, num_computed_tokens=8, num_kv_bytes=9, num_kv_bytes_arrived=8)
STOP = 2


@dataclass
class Grant:
    """One grant as router and sender know it; a key may be granted again, under another generation."""

    key: Owner
    generation: int
    tokens: range  # that the sender has to send
    position: int  # of the token that Done brings, among the outputs
    num_known: int = 0  # outputs that the router has been told of, that one included
    is_running: bool = False
    is_over: bool = False  # the router was told of its end, or has ended it

    def frame(self, **changes: Any) -> KVFrame:
        fields: dict[str, Any] = {
            "layout": LAYOUT.fingerprint,
            "sequence": 0,
            "layer_start": 0,
            "layer_end": 2,
            "token_start": self.tokens.start,
            "token_end": self.tokens.stop,
            "num_bytes": LAYOUT.frame_bytes(2, len(self.tokens)),
            "checksum": 11,
        }
        request_id, attempt = self.key
        return KVFrame(request_id=request_id, attempt=attempt, generation=self.generation, **(fields | changes))

    def done(self, **changes: Any) -> Done:
        num_frames = 1 if self.tokens else 0
        fields: dict[str, Any] = {
            "num_frames": num_frames,
            "digest": extend_digest(0, 11) if num_frames else 0,
            "position": self.position,
            "token": SampledToken(token=50),
            "stages": STAGES,
        }
        request_id, attempt = self.key
        return Done(request_id=request_id, attempt=attempt, generation=self.generation, **(fields | changes))


class AnyEvents(RuleBasedStateMachine):
    names = st.sampled_from("abcd")

    def __init__(self) -> None:
        super().__init__()
        self.core = CompletionCore(LIMITS, LAYOUT)
        self.now = 0.0
        self.attempts = dict.fromkeys("abcd", 0)
        self.requests: dict[Owner, GrantRequest] = {}
        self.grants: dict[Owner, Grant] = {}  # the latest of each key
        self.old: list[Grant] = []
        self.generations: set[int] = set()

    def latest(self, name: str) -> Grant | None:
        return self.grants.get((name, self.attempts[name]))

    @rule(
        name=names,
        length=st.integers(1, 12),
        num_output_tokens=st.integers(0, 2),
        max_tokens=st.integers(1, 9),
        remaining_ms=st.sampled_from([None, None, None, 0, 3000]),
        sender_is_dead=st.booleans(),
    )
    def ask(
        self,
        name: str,
        length: int,
        num_output_tokens: int,
        max_tokens: int,
        remaining_ms: int | None,
        sender_is_dead: bool,
    ) -> None:
        """A new attempt, whatever has become of the last one; it goes on from what a dead sender had sent."""
        last = self.latest(name)
        is_resumed = last is not None and not last.is_over and not last.is_running and sender_is_dead
        if last is not None and not last.is_over and not is_resumed:
            self.cancel(name, not last.is_running)
        self.attempts[name] += 1
        request = GrantRequest(
            request_id=name,
            attempt=self.attempts[name],
            resumed_attempt=self.attempts[name] - 1 if is_resumed else 0,
            arrival_order=ord(name),
            sampling=SamplingParams(max_tokens=max_tokens + num_output_tokens, stop_token_ids=(STOP,)),
            num_output_tokens=num_output_tokens,
            remaining_ms=remaining_ms,
            token_ids=tuple(range(100, 100 + length)),
        )
        self.requests[name, request.attempt] = request
        if last is not None and is_resumed:
            last.is_over = True
        self._ask(request)
        assert last is None or not is_resumed or self.core.pool.holding(last.key) is None, "what was resumed stays"

    @rule(name=names)
    def ask_again(self, name: str) -> None:
        """The request was delivered twice, at once or late."""
        request = self.requests.get((name, self.attempts[name]))
        if request is not None:
            self._ask(request)

    def _ask(self, request: GrantRequest) -> None:
        key = (request.request_id, request.attempt)
        was_free, was_held = self.core.pool.num_free, self.core.pool.holding(key) is not None
        resumed = self.grants.get((request.request_id, request.resumed_attempt))
        answers = self._do(self.core.on_router(request, self.now))
        assert not was_held or not answers, "a second grant for blocks that are held"
        for answer in answers:
            assert isinstance(answer, Granted | Busy | Failed)
            if not isinstance(answer, Granted):
                assert self.core.pool.num_free >= was_free, "refused, and blocks are taken"
                continue
            if resumed is not None and resumed not in self.old:
                self.old.append(resumed)
            assert answer.generation not in self.generations, "I2: a generation is given twice"
            self.generations.add(answer.generation)
            if key in self.grants:
                self.old.append(self.grants[key])
            arrived = max((answer.num_cached_tokens, *answer.arrived_tokens))  # the same in each layer, here
            tokens = range(arrived, len(request.token_ids))
            self.grants[key] = Grant(key, answer.generation, tokens, request.num_output_tokens)

    @rule(names=st.lists(names, min_size=1, max_size=3), length=st.integers(1, 7), num_steps=st.integers(0, 8))
    def serve(self, names: list[str], length: int, num_steps: int) -> None:
        """All goes well for some requests, and steps are run."""
        for name in names:
            grant = self.latest(name)
            if grant is None or grant.is_over:
                self.ask(name, length, 0, 9, None, False)
                grant = self.latest(name)
            if grant is not None and not grant.is_running:
                if grant.tokens:
                    self._give(grant, grant.frame())
                self._give(grant, grant.done())
        for _ in range(num_steps):
            self.step(50, False)

    @rule(name=names, length=st.integers(1, 7), more=st.integers(0, 3))
    def sender_dies_under_way(self, name: str, length: int, more: int) -> None:
        """Keys and values have come, Done has not: the next attempt goes on from them."""
        grant = self.latest(name)
        if grant is None or grant.is_over:
            self.ask(name, length, 0, 9, None, False)
        elif not grant.is_running:
            self._give(grant, grant.frame())
            self.ask(name, grant.tokens.stop + more, 0, 9, None, True)

    @rule(name=names, is_intact=st.booleans(), sequence=st.integers(0, 1))
    def frame(self, name: str, is_intact: bool, sequence: int) -> None:
        grant = self.latest(name)
        if grant is not None:
            self._give(grant, grant.frame(sequence=sequence), is_intact)

    @rule(name=names, is_right=st.booleans())
    def done(self, name: str, is_right: bool) -> None:
        grant = self.latest(name)
        if grant is not None:
            self._give(grant, grant.done(**({} if is_right else {"digest": 3})))

    @rule(which=st.integers(0, 20), what=st.sampled_from(["frame", "done", "cancelled"]))
    def late_message(self, which: int, what: str) -> None:
        """Of a grant before: no byte is written, and no grant of today disturbed."""
        if self.old:
            old = self.old[which % len(self.old)]
            messages = {"frame": old.frame, "done": old.done, "cancelled": lambda: _cancelled(old)}
            before = (self.core.pool.num_free, self.core.load().num_transfers)
            commands = self._give(old, messages[what]())
            assert all(isinstance(command, ToSender) for command in commands)
            assert (self.core.pool.num_free, self.core.load().num_transfers) == before

    @rule(name=names)
    def sender_stops(self, name: str) -> None:
        grant = self.latest(name)
        if grant is not None:
            self._give(grant, _cancelled(grant))
            assert grant.is_running or self.core.pool.holding(grant.key) is None, "it waits for nobody"

    @rule(name=names, sender_is_active=st.booleans())
    def cancel(self, name: str, sender_is_active: bool) -> None:
        key = (name, self.attempts[name])
        grant = self.latest(name)
        said = self._do(self.core.on_router(_cancel(key, sender_is_active), self.now))
        assert not said, "whoever cancels need not be told"
        if grant is not None:
            waits = sender_is_active and not grant.is_running
            grant.is_over, grant.is_running = True, False
            assert waits or self.core.pool.holding(key) is None

    @rule(token=st.sampled_from([50, 51, STOP]), does_raise=st.sampled_from([False, False, False, True]))
    def step(self, token: int, does_raise: bool) -> None:
        rows, commands = self.core.schedule()
        self._do(commands)
        for row in rows:
            table = row.sequence.block_table
            holding = self.core.pool.holding(row.sequence.key)
            assert holding is not None, "a row without blocks"
            assert list(table) == holding.blocks
            assert row.end <= len(table) * LIMITS.block_size
        if does_raise:
            self._do(self.core.failed(rows, "it raised", self.now))
        else:
            self._do(self.core.completed(rows, [SampledToken(token=token)] * len(rows), self.now))

    @rule(forgotten=st.sampled_from(["", "", "a", "b", "abcd"]), seconds=st.sampled_from([0.0, 0.5, 0.5, 2.0, 4.0]))
    def time_passes(self, forgotten: str, seconds: float) -> None:
        """The router renews what it wants, then the clock moves on."""
        latest = [self.latest(name) for name in "abcd" if name not in forgotten]
        grants = [grant for grant in latest if grant is not None and not grant.is_over]
        renew = Renew(
            requests=tuple(grant.key for grant in grants if not grant.is_running),
            prefilled=tuple(grant.key for grant in grants if grant.is_running),
        )
        self._do(self.core.on_router(renew, self.now))
        self._wait(seconds)

    @rule()
    def router_is_another(self) -> None:
        self._do(self.core.reset("abcd", self.now))
        for grant in self.grants.values():
            grant.is_over, grant.is_running = True, False

    def _wait(self, seconds: float) -> None:
        self.now += seconds
        self._do(self.core.tick(self.now))

    def _give(
        self, grant: Grant, message: KVFrame | Done | Cancelled, is_intact: bool = True
    ) -> list[CompletionCommand]:
        num_bytes = message.num_bytes if isinstance(message, KVFrame) else 0
        commands = self.core.on_data(message, num_bytes, is_intact, self.now)
        for command in commands:
            if isinstance(command, ToSender):
                assert command.message.generation == grant.generation
                if isinstance(command.message, Ack):
                    assert not grant.is_over, "what was given up or has failed is complete all the same"
                    grant.is_running = True
            if isinstance(command, WriteKV):
                assert is_intact
                assert not grant.is_over, "a late frame is written"
                self._check_write(command, grant)
        self._do(commands)
        return commands

    def _check_write(self, command: WriteKV, grant: Grant) -> None:
        holding = self.core.pool.holding(command.key)
        assert holding is not None, "I2"
        assert command.generation == grant.generation == holding.generation, "I2"
        assert list(command.block_table) == holding.blocks
        assert holding.use == "granted", "written into a sequence that runs"

    def _do(self, commands: list[CompletionCommand]) -> list[Any]:
        """Hear what the router is told; return it."""
        said = [command.message for command in commands if isinstance(command, ToRouter)]
        for message in said:
            match message:
                case Tokens():
                    for report in message.sequences:
                        grant = self.grants[report.request_id, report.attempt]
                        assert grant.is_running, "tokens of what does not run"
                        assert report.position == grant.position + grant.num_known, "a token twice, or a hole"
                        grant.num_known += len(report.tokens)
                        if report.finish_reason is not None:
                            self._end(grant)
                case Handback():
                    self._end(self.grants[message.request_id, message.attempt])
                case Failed():
                    grant = self.grants.get((message.request_id, message.attempt))
                    if grant is not None and self._is_ended_by(message, grant):
                        self._end(grant)
                case _:
                    assert isinstance(message, Granted | Busy | Unknown)
        return said

    def _is_ended_by(self, message: Failed, grant: Grant) -> bool:
        """A request that is refused was delivered once more, and says nothing of the grant before."""
        return not (message.is_expired and grant.is_over and self.core.pool.holding(grant.key) is None)

    def _end(self, grant: Grant) -> None:
        assert not grant.is_over, "its end is told twice, or after the router had ended it"
        grant.is_over, grant.is_running = True, False

    @invariant()
    def every_block_has_an_owner_that_is_known_and_has_a_deadline(self) -> None:
        self.core.check()
        load = self.core.load()
        assert load.num_free_blocks + load.num_granted_blocks + self.core.pool.num_used("sequence") == 12
        running = {key for key, grant in self.grants.items() if grant.is_running}
        assert set(self.core.scheduler.keys()) == running
        deadline = self.core.deadline()
        assert (deadline is None) == (not self.core.pool.owners()), "I6: blocks are held and nothing is waited for"
        assert deadline is None or deadline <= self.now + LEASE_S

    def teardown(self) -> None:
        """Everybody falls silent."""
        self._wait(LEASE_S)
        self._wait(LEASE_S)
        assert self.core.pool.num_free == LIMITS.num_blocks
        assert self.core.deadline() is None


def _cancelled(grant: Grant) -> Cancelled:
    return Cancelled(request_id=grant.key[0], attempt=grant.key[1], generation=grant.generation)


def _cancel(key: Owner, sender_is_active: bool) -> Cancel:
    return Cancel(request_id=key[0], attempt=key[1], sender_is_active=sender_is_active)


AnyEvents.TestCase.settings = SHORT
TestAnyEvents = AnyEvents.TestCase


@pytest.mark.slow
@pytest.mark.timeout(LONG_S)
def test_many_more_lives_of_a_completion_worker() -> None:
    run_state_machine_as_test(AnyEvents, settings=LONG)
