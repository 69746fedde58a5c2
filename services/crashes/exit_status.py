"""Exit codes of workers, and exit statuses in words."""

from __future__ import annotations

import signal

#: exit codes of a worker that gave its work back because a run (or a load) could not be stopped
RUN_STUCK = 4
LOAD_STUCK = 5


def describe_exit(code: int) -> str:
    """Describe how a process ended, for messages: "ended with exit code 3", "was ended by SIGKILL"."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
