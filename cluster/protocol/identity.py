"""Names of processes: a worker's stable name plus the incarnation of the process that bears it.

Identifiers are minted here and by the router only. Nothing that a client sends becomes an identifier or an address.
"""

import secrets
from dataclasses import dataclass
from typing import Literal

Role = Literal["PROMPT", "COMPLETION"]

PROTOCOL_VERSION = 4


@dataclass(frozen=True, order=True)
class WorkerId:
    """One process: `name` survives restarts ("prompt-0"), `incarnation` does not."""

    name: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.name}/{self.incarnation}"

    @staticmethod
    def parse(text: str) -> "WorkerId":
        """Raises ValueError when `text` is not `name/incarnation`."""
        name, separator, incarnation = text.partition("/")
        if not (name and separator and incarnation):
            raise ValueError(f"worker id {text!r} is not of the form name/incarnation")
        return WorkerId(name, incarnation)


def new_incarnation() -> str:
    return secrets.token_hex(4)


def new_request_id() -> str:
    return secrets.token_hex(12)
