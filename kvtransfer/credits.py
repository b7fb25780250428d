"""Credits on their way back to the senders, several frames' in one message. Pure.

A reply costs both ends as much for a frame of 64 KiB as for one of 4 MiB. So the credits of one turn of the receiving
loop are joined, as long as the sender loses nothing by it: what is held back is small beside its window, and the loop
sends it before it turns to anything else.
"""

from .frames import Credit
from .receiver import Key

JOINED_BYTES = 1 << 20


class HeldCredits:
    def __init__(self) -> None:
        self._held: dict[tuple[bytes, Key, int], Credit] = {}

    def add(self, peer: bytes, credit: Credit) -> Credit | None:
        """Hold `credit`, or return all that is due to its transfer, once that is worth a message."""
        slot = (peer, credit.key, credit.generation)
        held = self._held.pop(slot, None)
        if held is not None:
            credit = credit.model_copy(update={"num_bytes": held.num_bytes + credit.num_bytes})
        if credit.num_bytes >= JOINED_BYTES:
            return credit
        self._held[slot] = credit
        return None

    def take(self) -> list[tuple[bytes, Credit]]:
        """Return all that is held, each with its peer."""
        held, self._held = self._held, {}
        return [(peer, credit) for (peer, _, _), credit in held.items()]
