"""One ZMQ message as its parts, however many a peer sent: what is beyond the allowed number is not kept."""

import zmq


def receive_parts(socket: zmq.Socket[bytes], max_parts: int) -> list[zmq.Frame]:
    """Take one message. One with too many parts comes as `max_parts` + 1 of them. Raises zmq.Again when there is none.

    libzmq hands a message over when all its parts are there; so none of the later ones is waited for.
    """
    part = socket.recv(zmq.NOBLOCK, copy=False)
    parts = [part]
    while part.more:
        part = socket.recv(zmq.NOBLOCK, copy=False)
        if len(parts) <= max_parts:
            parts.append(part)
    return parts
