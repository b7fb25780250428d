"""One measurement on live workers: who may be asked, what is sent, and that it ends once, in time, whoever dies."""

from typing import Any

import pytest
from twinpool.cluster.config import ClusterSpec, LivenessSpec
from twinpool.cluster.protocol.identity import WorkerId
from twinpool.cluster.protocol.messages import (
    Busy,
    Cancel,
    Failed,
    Granted,
    GrantRequest,
    Heartbeat,
    Hello,
    Introduce,
    KVLayoutInfo,
    Leaving,
    Load,
    Message,
    ModelIdentity,
    PassesTimed,
    SamplingParams,
    TimePasses,
    TimeTransfer,
    TransferTimed,
)
from twinpool.router.core import CoreCommand, RouterCore
from twinpool.router.generation import GenerationRequest
from twinpool.router.lifecycle import Send
from twinpool.router.probes import PassesQuestion, ProbeEnded, ProbeRefusal, TransferQuestion

P, D = WorkerId("prompt-0", "p1"), WorkerId("completion-0", "d1")
SPEC = ClusterSpec(liveness=LivenessSpec(lease_s=5.0))
REQUEST = GenerationRequest("r", (1, 2, 3), SamplingParams())
PASSES = PassesQuestion(worker="prompt-0", rows=((0, 8), (9, 1)), num_warmup=2, num_repeats=3, limit_s=20.0)
TRANSFER = TransferQuestion(prompt="prompt-0", completion="completion-0", num_tokens=7, limit_s=20.0)
TIMED = PassesTimed(probe_id="p", pass_s=(0.1, 0.2, 0.3))
GRANTED = Granted(request_id="p", attempt=0, generation=4, credit_bytes=99, num_free_blocks=8)
SENT = TransferTimed(probe_id="p", transfer_s=0.25)


def hello(role: str) -> Hello:
    layout = KVLayoutInfo(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
    return Hello(
        role=role,
        pid=12,
        host="h",
        identity=ModelIdentity(model="m", fingerprint="f", dtype="float32", layout=layout),
        block_size=4,
        num_blocks=10,
        max_model_len=99,
        max_num_batched_tokens=64,
        max_num_seqs=4,
        data_addresses=("tcp://d",) if role == "COMPLETION" else (),
    )


def beat(num_free_blocks: int = 10, progress: int = 1) -> Heartbeat:
    return Heartbeat(progress=progress, is_busy=False, load=Load(num_blocks=10, num_free_blocks=num_free_blocks))


def new_core() -> RouterCore:
    core = RouterCore(SPEC, "router-1")
    core.on_message(P, hello("PROMPT"), 0.0)
    core.on_message(D, hello("COMPLETION"), 0.0)
    return core


def cancel(worker: WorkerId, is_sending: bool = False) -> Send:
    return Send(worker, Cancel(request_id="p", attempt=0, sender_is_active=is_sending))


def refusal(commands: list[Any]) -> ProbeRefusal:
    (ended,) = [command for command in commands if isinstance(command, ProbeEnded)]
    assert isinstance(ended.result, ProbeRefusal)
    return ended.result


def sending() -> RouterCore:
    """A core whose transfer is on its way."""
    core = new_core()
    core.probe("p", TRANSFER, 1.0)
    core.on_message(D, GRANTED, 1.1)
    return core


def is_used(core: RouterCore) -> bool:
    """Whether a request would go to the workers now; it is withdrawn."""
    sent = core.submit(REQUEST, 2.0)
    core.cancel(REQUEST.request_id, 2.0)
    return any(isinstance(c, Send) and isinstance(c.message, GrantRequest) for c in sent)


def test_passes_are_asked_for_and_their_times_end_the_probe() -> None:
    core = new_core()
    order = TimePasses(probe_id="p", rows=PASSES.rows, num_warmup=2, num_repeats=3, limit_s=20.0)
    assert core.probe("p", PASSES, 1.0) == [Send(P, order)]
    assert not is_used(core), "a worker under probe gets nothing new"
    assert core.on_message(P, TIMED, 2.0) == [ProbeEnded("p", (0.1, 0.2, 0.3))]
    assert core.on_message(P, TIMED, 2.1) == [], "delivered twice"
    assert is_used(core)


def test_a_request_that_waited_for_a_probe_goes_on_at_its_end() -> None:
    core = new_core()
    core.probe("p", PASSES, 1.0)
    assert core.submit(REQUEST, 1.1) == []
    assert core.tick(1.2) == []
    ended, grant = core.on_message(P, TIMED, 2.0)
    assert isinstance(ended, ProbeEnded)
    assert isinstance(grant, Send)
    assert isinstance(grant.message, GrantRequest)


def test_a_transfer_is_granted_sent_and_timed() -> None:
    core = new_core()
    (ask,) = core.probe("p", TRANSFER, 1.0)
    assert isinstance(ask, Send)
    assert isinstance(ask.message, GrantRequest)
    assert (ask.worker, len(ask.message.token_ids), ask.message.attempt) == (D, 7, 0)
    order = TimeTransfer(
        probe_id="p", num_tokens=7, generation=4, credit_bytes=99, receiver=str(D), receiver_addresses=("tcp://d",)
    )
    assert core.on_message(D, GRANTED, 1.1) == [Send(P, order)]
    assert core.on_message(D, GRANTED, 1.1) == [], "delivered twice"
    assert not is_used(core)
    assert core.on_message(P, SENT, 1.5) == [cancel(D), ProbeEnded("p", (0.25,))]
    assert is_used(core)


@pytest.mark.parametrize(
    ("question", "reason"),
    [
        (PASSES.model_copy(update={"worker": "x"}), "no worker x; present: completion-0, prompt-0"),
        (TRANSFER.model_copy(update={"prompt": "completion-0"}), "completion-0 is a COMPLETION worker"),
        (TRANSFER.model_copy(update={"completion": "prompt-0"}), "prompt-0 is a PROMPT worker"),
    ],
)
def test_a_question_about_the_wrong_worker_is_refused(question: PassesQuestion, reason: str) -> None:
    core = new_core()
    refused = refusal(core.probe("p", question, 1.0))
    assert reason in refused.reason
    assert not refused.is_retryable


@pytest.mark.parametrize("question", [PASSES, TRANSFER])
def test_workers_of_requests_are_busy_from_the_grant_on(question: PassesQuestion | TransferQuestion) -> None:
    """The PROMPT worker too, which knows nothing of the request yet."""
    core = new_core()
    core.submit(REQUEST, 1.0)
    refused = refusal(core.probe("p", question, 1.1))
    assert "serves requests" in refused.reason
    assert refused.is_retryable
    core.cancel("r", 1.2)
    assert isinstance(core.probe("p", question, 1.3)[0], Send)


def test_one_probe_at_a_time_on_a_worker_and_several_on_several() -> None:
    core = new_core()
    core.probe("p", PASSES, 1.0)
    assert "another probe" in refusal(core.probe("q", TRANSFER, 1.0)).reason
    assert isinstance(core.probe("q", PASSES.model_copy(update={"worker": "completion-0"}), 1.0)[0], Send)
    assert core.probes.workers == {P, D}
    core.on_message(P, TIMED, 2.0)
    assert core.probes.workers == {D}


def test_a_suspect_worker_is_not_asked() -> None:
    core = new_core()
    core.on_message(D, beat(), 0.5)
    core.tick(0.5)
    core.tick(1.4)
    core.on_message(D, beat(), 1.5)
    core.tick(2.2)
    refused = refusal(core.probe("p", PASSES, 2.2))
    assert refused == ProbeRefusal("prompt-0 is suspect", is_retryable=True)


@pytest.mark.parametrize("is_retryable", [True, False])
def test_what_a_worker_refuses_is_passed_on(is_retryable: bool) -> None:
    failed = Failed(request_id="p", attempt=0, reason="x", is_retryable=is_retryable)
    core = new_core()
    core.probe("p", PASSES, 1.0)
    expected = ProbeEnded("p", ProbeRefusal("prompt-0: x", is_retryable))
    assert core.on_message(P, failed, 1.1) == [expected]
    assert sending().on_message(P, failed, 1.2) == [cancel(D), expected], "the sender has stopped by itself"
    by_receiver = ProbeEnded("p", ProbeRefusal("completion-0: x", is_retryable))
    assert sending().on_message(D, failed, 1.2) == [cancel(P), by_receiver]


def test_a_receiver_without_room_ends_the_transfer() -> None:
    core = new_core()
    core.probe("p", TRANSFER, 1.0)
    ended = core.on_message(D, Busy(request_id="p", attempt=0, num_free_blocks=1), 1.1)
    assert ended == [ProbeEnded("p", ProbeRefusal("completion-0 has no room", is_retryable=True))]


@pytest.mark.parametrize(
    ("core", "stops"),
    [("passes", [cancel(P)]), ("granting", [cancel(D)]), ("sending", [cancel(P), cancel(D, is_sending=True)])],
)
def test_nobody_answers_and_the_probe_ends_by_its_deadline(core: str, stops: list[Send]) -> None:
    """I6: whatever message was lost. The worker's own limit comes first, so that its answer is still in time."""
    asked = sending() if core == "sending" else new_core()
    if core != "sending":
        asked.probe("p", PASSES if core == "passes" else TRANSFER, 1.0)
    seen: list[CoreCommand] = []
    for tenths in range(10, 262):
        now = tenths / 10
        asked.on_message(P, beat(progress=tenths), now)
        asked.on_message(D, beat(progress=tenths), now)
        assert not seen or now > 26.0
        seen += asked.tick(now)
    assert seen == [*stops, ProbeEnded("p", ProbeRefusal("no answer within 25 s"))]
    assert is_used(asked)
    assert asked.on_message(P, TIMED, 27.0) == [], "too late"
    assert asked.on_message(P, SENT, 27.0) == []


@pytest.mark.parametrize(("dead", "stops"), [(P, [cancel(D)]), (D, [cancel(P)])])
def test_a_worker_that_dies_ends_its_probe(dead: WorkerId, stops: list[Send]) -> None:
    core = sending()
    commands = core.on_message(dead, Leaving(), 2.0)
    assert commands[:2] == [*stops, ProbeEnded("p", ProbeRefusal(f"{dead.name} died meanwhile"))]
    assert core.probes.workers == frozenset()
    assert core.on_message(dead, SENT, 2.1) == [Send(dead, Introduce())]


def test_a_new_process_under_the_name_ends_the_probe_of_the_old_one() -> None:
    core = new_core()
    core.probe("p", PASSES, 1.0)
    new = WorkerId("prompt-0", "p2")
    commands = core.on_message(new, hello("PROMPT"), 2.0)
    assert refusal(commands).reason == "prompt-0 died meanwhile"
    assert core.on_message(new, TIMED, 2.1) == []


def test_a_restarted_router_knows_no_probe() -> None:
    """Its workers are told to begin anew, and that ends what they run."""
    assert RouterCore(SPEC, "router-2").on_message(P, TIMED, 0.0) == [Send(P, Introduce())]
    assert new_core().on_message(P, TIMED, 0.0) == []


def test_a_probe_that_nobody_waits_for_is_called_off_once() -> None:
    core = sending()
    assert core.cancel_probe("p") == [cancel(P), cancel(D, is_sending=True)]
    assert core.cancel_probe("p") == []
    assert core.on_message(P, SENT, 1.5) == []
    assert is_used(core)


@pytest.mark.parametrize("message", [TIMED, SENT, GRANTED])
def test_only_a_probes_own_workers_are_heard(message: Message) -> None:
    core = new_core()
    core.probe("p", PASSES, 1.0)
    assert core.on_message(D, message, 1.1) == []
    assert core.probes.workers == {P}


def test_a_worker_that_answers_what_it_was_not_asked_does_no_harm() -> None:
    core = new_core()
    core.probe("p", PASSES, 1.0)
    assert core.on_message(P, GRANTED, 1.1) == []
    assert core.on_message(P, TIMED, 1.2) == [ProbeEnded("p", TIMED.pass_s)]


def test_blocks_that_a_probe_holds_count_as_free_again_at_its_end() -> None:
    """A heartbeat from the middle of a probe would keep requests waiting until the next one."""
    core = new_core()
    core.probe("p", PASSES.model_copy(update={"worker": "completion-0"}), 1.0)
    core.on_message(D, beat(num_free_blocks=0), 1.1)
    core.on_message(D, TIMED, 1.2)
    assert is_used(core)
    core.on_message(D, beat(num_free_blocks=0), 1.3)
    assert not is_used(core), "without a probe it counts"
