"""A message as its parts: as many as are allowed, and one more that says there were others."""

import pytest
import zmq
from twinpool.cluster.protocol.parts import receive_parts


@pytest.mark.parametrize("num_parts", [1, 2, 3, 20_000])
def test_parts_beyond_the_limit_are_not_kept(context: zmq.Context[zmq.Socket[bytes]], num_parts: int) -> None:
    with context.socket(zmq.PAIR) as sender, context.socket(zmq.PAIR) as receiver:
        sender.bind("inproc://parts")
        receiver.connect("inproc://parts")
        sender.send_multipart([b"%d" % i for i in range(num_parts)])
        sender.send(b"the next one")
        receiver.poll(5000)
        assert [part.bytes for part in receive_parts(receiver, 2)] == [b"0", b"1", b"2"][:num_parts]
        receiver.poll(5000)
        assert [part.bytes for part in receive_parts(receiver, 2)] == [b"the next one"]
        with pytest.raises(zmq.Again):
            receive_parts(receiver, 2)
