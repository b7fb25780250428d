"""The exceptions of Twinpool. Each says what was got, what is allowed, and where there is one, a hint.

TwinpoolError
├── ConfigError        a spec, flag or environment value is wrong
├── ProtocolError      a peer sent something that is not a message of ours
│   └── VersionError   … because it speaks another version of the protocol
├── InvalidRequestError  a client's request is wrong: becomes a 4xx
├── UnsupportedModelError  a model that the engine cannot serve exactly
└── LaunchError        a cluster could not be started, reached or stopped
"""


class TwinpoolError(Exception):
    """`str()` is one message fit for a user; `hint` is the next thing to try."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\nhint: {hint}")
        self.message = message
        self.hint = hint


class ConfigError(TwinpoolError):
    pass


class ProtocolError(TwinpoolError):
    pass


class VersionError(ProtocolError):
    """A peer that speaks another version of the protocol: it is refused, not ignored (I7)."""


class UnsupportedModelError(TwinpoolError):
    pass


class LaunchError(TwinpoolError):
    pass


class InvalidRequestError(TwinpoolError):
    """Carries the fields of the OpenAI error body."""

    def __init__(
        self, message: str, *, param: str | None = None, code: str = "invalid_value", status: int = 400
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status
