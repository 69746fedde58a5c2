"""How processes end: what a worker's exit code says, and the words for it."""

from __future__ import annotations

import signal

#: a worker that gave its work back since a run, or a load, of one version could not be ended
RUN_STUCK = 4
LOAD_STUCK = 5


def cause(code: int) -> str:
    """How a process ended, for people: an exit code, or the signal that ended it."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
