"""How much of the slow suite's faults a run can afford: all of them, or the share that TWINPOOL_SHARE says."""

import os

SHARE = float(os.environ.get("TWINPOOL_SHARE", "1"))


def share_of(number: int) -> int:
    """Return so many, at least one; less when the run has a smaller share."""
    return max(1, round(number * SHARE))
