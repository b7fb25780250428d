"""By what a pair's payloads travel, and what is said when the spec and the peer do not agree."""

import pytest
from twinpool.cluster.config import TransferSpec
from twinpool.kvtransfer.transport import Choice, advertised, choose_way, offered, offers

SOCKETS = ("ipc:///run/kv", "tcp://127.0.0.1:5")
HERE, THERE, ELSEWHERE = "h1/GPU-1", "h1/GPU-2", "h2/GPU-3"


def spec(transport: str = "auto", is_isolated: bool = False) -> TransferSpec:
    return TransferSpec.model_validate({"transport": transport, "isolated_network": is_isolated})


@pytest.mark.parametrize(
    ("transport", "gpu", "expected"),
    [
        ("zmq", HERE, ()),
        ("auto", None, ()),
        ("auto", HERE, ("nccl://h1/GPU-1",)),
        ("nccl", HERE, ("nccl://h1/GPU-1",)),
        ("gloo", None, ("gloo://10.0.0.1",)),
        ("gloo", HERE, ("gloo://10.0.0.1",)),
    ],
)
def test_what_a_completion_worker_offers(transport: str, gpu: str | None, expected: tuple[str, ...]) -> None:
    assert offers(spec(transport), "10.0.0.1", gpu) == expected


def test_an_offer_is_found_among_the_addresses() -> None:
    assert offered((*SOCKETS, "gloo://10.0.0.1"), "gloo") == "10.0.0.1"
    assert offered(SOCKETS, "gloo") is None


@pytest.mark.parametrize(
    ("gpu", "theirs", "is_isolated", "choice"),
    [
        (None, None, False, Choice("zmq", "auto: this worker has no GPU with NCCL")),
        (None, THERE, False, Choice("zmq", "auto: this worker has no GPU with NCCL")),
        (HERE, None, False, Choice("zmq", "auto: the peer offers no NCCL")),
        (HERE, HERE, True, Choice("zmq", "auto: both workers are on one GPU, which NCCL does not allow")),
        (HERE, THERE, False, Choice("nccl", "auto: both have a GPU, on one host")),
        (HERE, ELSEWHERE, True, Choice("nccl", "auto: both have a GPU, and transfer.isolated_network is set")),
        (
            HERE,
            ELSEWHERE,
            False,
            Choice("zmq", "auto: the GPUs are on two hosts, and transfer.isolated_network is not set"),
        ),
    ],
)
def test_auto_takes_nccl_where_it_can_and_may(
    gpu: str | None, theirs: str | None, is_isolated: bool, choice: Choice
) -> None:
    addresses = (*SOCKETS, *(() if theirs is None else (f"nccl://{theirs}",)))
    assert choose_way(spec("auto", is_isolated), gpu, addresses) == choice


def test_auto_never_takes_gloo() -> None:
    assert choose_way(spec(), HERE, (*SOCKETS, "gloo://127.0.0.1")).way == "zmq"


@pytest.mark.parametrize(
    ("transport", "addresses"),
    [("zmq", (*SOCKETS, "nccl://h1/GPU-2")), ("nccl", (*SOCKETS, "nccl://h2/GPU-3")), ("gloo", ("gloo://x",))],
)
def test_what_the_spec_says_is_done(transport: str, addresses: tuple[str, ...]) -> None:
    assert choose_way(spec(transport), HERE, addresses) == Choice(transport, f"transfer.transport is {transport}")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("transport", "gpu", "addresses", "problem"),
    [
        ("gloo", None, SOCKETS, "the peer offers no Gloo"),
        ("nccl", None, SOCKETS, "this worker has no GPU with NCCL"),
        ("nccl", HERE, SOCKETS, "the peer offers no NCCL"),
        ("nccl", HERE, (*SOCKETS, f"nccl://{HERE}"), "both workers are on one GPU"),
    ],
)
def test_what_cannot_be_done_is_refused_naming_both_sides(
    transport: str, gpu: str | None, addresses: tuple[str, ...], problem: str
) -> None:
    with pytest.raises(
        ConnectionError, match=rf"transfer.transport is '{transport}' here, the peer offers .*'tcp'.*: "
    ):
        choose_way(spec(transport), gpu, addresses)
    with pytest.raises(ConnectionError, match=problem):
        choose_way(spec(transport), gpu, addresses)


def test_an_address_elsewhere_stands_for_the_sockets_alone() -> None:
    addresses = (*SOCKETS, "gloo://10.0.0.1")
    assert advertised(addresses, None) == addresses
    assert advertised(addresses, "tcp://kv:7000") == ("tcp://kv:7000", "gloo://10.0.0.1")
