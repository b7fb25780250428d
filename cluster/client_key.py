"""The API key with which Twinpool's own commands ask an endpoint that is closed without one."""

import os

KEY_VARIABLE = "TWINPOOL_API_KEY"
KEY_HINT = f"set {KEY_VARIABLE} to one of the cluster's API keys"


def key_headers() -> dict[str, str]:
    """Return the headers to send: none when the variable is not set."""
    key = os.environ.get(KEY_VARIABLE)
    return {"authorization": f"Bearer {key}"} if key else {}
