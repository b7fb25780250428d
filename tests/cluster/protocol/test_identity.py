"""Names of processes."""

import pytest
from twinpool.cluster.protocol.identity import WorkerId, new_incarnation, new_request_id


def test_a_worker_id_survives_its_text_form() -> None:
    worker = WorkerId("prompt-0", new_incarnation())
    assert WorkerId.parse(str(worker)) == worker


@pytest.mark.parametrize("text", ["", "prompt-0", "/", "prompt-0/", "/abc"])
def test_half_a_worker_id_is_none(text: str) -> None:
    with pytest.raises(ValueError, match="name/incarnation"):
        WorkerId.parse(text)


def test_identifiers_do_not_repeat() -> None:
    assert len({new_incarnation() for _ in range(500)}) == 500
    assert len({new_request_id() for _ in range(500)}) == 500
