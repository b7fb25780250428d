"""Workers and requests together: hellos, refusals, strangers, deaths, incidents."""

from typing import Any

from cost_profiles import cost_profile
from twinpool.cluster.config import ClusterSpec, LivenessSpec
from twinpool.cluster.protocol.identity import WorkerId
from twinpool.cluster.protocol.messages import (
    GrantRequest,
    Heartbeat,
    Hello,
    Introduce,
    KVLayoutInfo,
    Leaving,
    Load,
    ModelIdentity,
    PeerGone,
    Refused,
    Renew,
    SamplingParams,
    Unknown,
    Welcome,
)
from twinpool.router.core import MAX_INCIDENTS, RouterCore
from twinpool.router.generation import GenerationFailed, GenerationRequest
from twinpool.router.lifecycle import Emit, Send

P, D = WorkerId("prompt-0", "p1"), WorkerId("completion-0", "d1")
SPEC = ClusterSpec(liveness=LivenessSpec(gone_after_s=3.0))
REQUEST = GenerationRequest("r", (1, 2, 3), SamplingParams())


def hello(role: str, model: str = "m", **changes: Any) -> Hello:
    layout = KVLayoutInfo(num_layers=1, num_kv_heads=1, head_dim=1, dtype="float32")
    fields: dict[str, Any] = {
        "role": role,
        "pid": 12,
        "host": "h",
        "identity": ModelIdentity(model=model, fingerprint="f", dtype="float32", layout=layout),
        "block_size": 4,
        "num_blocks": 10,
        "max_model_len": 99,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 4,
        "data_addresses": ("tcp://d",),
    }
    return Hello(**(fields | changes))


def beat(num_free_blocks: int = 10, progress: int = 1) -> Heartbeat:
    return Heartbeat(progress=progress, is_busy=False, load=Load(num_blocks=10, num_free_blocks=num_free_blocks))


def core_with_pair() -> RouterCore:
    core = RouterCore(SPEC, "router-1")
    core.on_message(P, hello("PROMPT"), 0.0)
    core.on_message(D, hello("COMPLETION"), 0.0)
    return core


def incidents(core: RouterCore) -> list[tuple[str, str]]:
    return [(incident.worker, incident.what) for incident in core.incidents]


def test_a_worker_that_fits_is_welcomed() -> None:
    core = RouterCore(SPEC, "router-1")
    welcome = Send(P, Welcome(router_incarnation="router-1"))
    assert core.on_message(P, hello("PROMPT"), 0.0) == [welcome]
    assert core.on_message(P, hello("PROMPT"), 1.0) == [welcome], "said twice, answered twice"
    assert not core.dispatcher.is_complete
    core.on_message(D, hello("COMPLETION"), 0.0)
    assert core.dispatcher.is_complete
    assert incidents(core) == [
        ("prompt-0", "joined as PROMPT, pid 12"),
        ("completion-0", "joined as COMPLETION, pid 12"),
    ]


def test_a_worker_that_does_not_fit_is_refused_and_not_used() -> None:
    """I7: the message names both values, and an operator sees it."""
    core = core_with_pair()
    other = WorkerId("completion-1", "d1")
    (refused,) = core.on_message(other, hello("COMPLETION", model="another"), 0.0)
    assert refused == Send(other, Refused(reason="model 'another' where the cluster has 'm'"))
    assert core.membership.get(other) is None
    assert incidents(core)[-1] == ("completion-1", "refused: model 'another' where the cluster has 'm'")
    assert core.on_message(other, beat(), 0.1) == [Send(other, Introduce())]


def test_a_very_long_reason_still_fits_its_message() -> None:
    core = core_with_pair()
    commands = core.on_message(WorkerId("x", "1"), hello("PROMPT", model="y" * 512), 0.0)
    assert isinstance(commands[0], Send)
    assert isinstance(commands[0].message, Refused)


def test_a_stranger_has_to_introduce_itself() -> None:
    """A router that restarted knows nobody; whatever they say, they must join first."""
    core = RouterCore(SPEC, "router-2")
    for message in (beat(), Unknown(requests=(("r", 1),))):
        assert core.on_message(P, message, 0.0) == [Send(P, Introduce())]


def test_a_waiting_request_starts_when_the_pair_is_whole() -> None:
    core = core_with_pair()
    commands = core.submit(REQUEST, 0.5)
    assert [(c.worker, type(c.message)) for c in commands if isinstance(c, Send)] == [(D, GrantRequest)]


def test_the_dead_are_noticed_by_the_clock_and_their_requests_move() -> None:
    core = core_with_pair()
    spare = WorkerId("completion-1", "d1")
    core.on_message(spare, hello("COMPLETION"), 0.0)
    core.submit(REQUEST, 0.5)  # goes to completion-0
    commands: list[Any] = []
    for tenth in range(1, 35):
        core.on_message(P, beat(progress=tenth), tenth / 10)
        core.on_message(spare, beat(progress=tenth), tenth / 10)
        commands += core.tick(tenth / 10)
    moved = [(c.worker, c.message) for c in commands if isinstance(c, Send) and not isinstance(c.message, Renew)]
    (told, gone), (asked, grant) = moved
    assert (told, gone) == (P, PeerGone(worker="completion-0/d1"))
    assert asked == spare
    assert isinstance(grant, GrantRequest)
    assert grant.attempt == 2
    assert incidents(core)[-1] == ("completion-0", "gone: no heartbeat for 3.0 s")


def test_a_new_incarnation_takes_over_from_the_old() -> None:
    core = core_with_pair()
    core.submit(REQUEST, 0.5)
    again = WorkerId("completion-0", "d2")
    commands = core.on_message(again, hello("COMPLETION"), 1.0)
    sends = [(c.worker, type(c.message)) for c in commands if isinstance(c, Send)]
    assert sends == [(again, Welcome), (P, PeerGone), (again, GrantRequest)]
    assert core.on_message(D, beat(), 1.1) == [Send(D, Introduce())]


def test_a_heartbeat_tells_the_dispatcher_how_much_room_there_is() -> None:
    core = core_with_pair()
    core.on_message(D, beat(num_free_blocks=0), 0.1)
    assert core.submit(REQUEST, 0.2) == [], "no room"
    assert core.on_message(D, beat(num_free_blocks=10), 0.3) == []
    assert [type(c.message) for c in core.tick(0.4) if isinstance(c, Send)] == [GrantRequest]


def test_a_cancelled_request_is_stopped() -> None:
    core = core_with_pair()
    core.submit(REQUEST, 0.5)
    assert [c.worker for c in core.cancel("r", 0.6) if isinstance(c, Send)] == [D]
    assert core.dispatcher.num_running == 0


def test_a_request_without_workers_is_refused() -> None:
    (event,) = RouterCore(SPEC, "router-1").submit(REQUEST, 0.0)
    assert isinstance(event, Emit)
    assert isinstance(event.event, GenerationFailed)


def test_incidents_are_bounded() -> None:
    """I8."""
    core = RouterCore(SPEC, "router-1")
    for number in range(3 * MAX_INCIDENTS):
        core.on_message(WorkerId("prompt-0", str(number)), hello("PROMPT"), 0.0)
    assert len(core.incidents) == MAX_INCIDENTS


def test_a_worker_that_leaves_is_gone_at_once_and_its_requests_go_on() -> None:
    """No one waits for the heartbeats of a worker that was stopped on purpose to fail."""
    core = core_with_pair()
    other = WorkerId("completion-1", "d2")
    core.on_message(other, hello("COMPLETION"), 0.0)
    asked = core.submit(REQUEST, 0.1)
    holder = next(command.worker for command in asked if isinstance(command, Send))
    commands = core.on_message(holder, Leaving(), 0.2)
    again = [c.worker for c in commands if isinstance(c, Send) and isinstance(c.message, GrantRequest)]
    assert again == [other if holder == D else D]
    assert (holder.name, "gone: stopped") in incidents(core)
    assert core.membership.get(holder) is None


def test_a_suspect_worker_gets_nothing_new() -> None:
    """A worker that has been silent for two seconds keeps what it has, but the next request goes elsewhere."""
    core = core_with_pair()
    other = WorkerId("completion-1", "d2")
    core.on_message(other, hello("COMPLETION"), 0.0)
    for step in range(1, 26):
        core.tick(step * 0.1)
        for worker in (P, other):
            core.on_message(worker, beat(progress=step), step * 0.1)
    core.tick(2.6)
    silent = core.membership.get(D)
    assert silent is not None
    assert silent.state == "suspect"
    for number in range(3):
        commands = core.submit(GenerationRequest(f"r{number}", (1, 2), SamplingParams()), 2.6)
        assert [c.worker for c in commands if isinstance(c, Send)] == [other]


def test_costs_of_another_model_are_not_used_and_said_so() -> None:
    """The worker serves all the same; where it is the model that was measured, nothing is said."""
    profile = cost_profile()
    core = RouterCore(SPEC, "router-1", profile)
    core.on_message(P, hello("PROMPT"), 0.0)
    assert [what for _, what in incidents(core) if "costs" in what] == [
        "its costs are not known: the cost profile was measured on something else:\n"
        f"  weights: measured with {profile.fingerprint.weights}, asked for f\n"
        "  dtype: measured with bfloat16, asked for float32"
    ]
    fits = hello("PROMPT").identity.model_copy(update={"fingerprint": profile.fingerprint.weights, "dtype": "bfloat16"})
    other = RouterCore(SPEC, "router-1", profile)
    other.on_message(P, hello("PROMPT", identity=fits), 0.0)
    assert not any("costs" in what for _, what in incidents(other))


def test_a_worker_that_is_silent_since_a_connection_closed_is_gone_when_suspect() -> None:
    core = core_with_pair()
    core.connection_lost(0.1)
    for tenth in range(1, 22):
        core.on_message(P, beat(progress=tenth), tenth / 10)
        core.tick(tenth / 10)
    assert core.membership.get(D) is None
    assert core.membership.get(P) is not None
