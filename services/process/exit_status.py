"""How processes end: exit codes of workers, statuses in words, and the end at a second signal."""

from __future__ import annotations

import logging
import os
import signal
from typing import NoReturn

log = logging.getLogger("millstream.process")

#: exit codes of a worker that gave its work back because a run (or a load) could not be stopped
RUN_STUCK = 4
LOAD_STUCK = 5
_SIGNALLED = 128  # exit status of a shell's command that a signal ended, less the signal's number: 143, 130


def describe_exit(code: int) -> str:
    """Describe how a process ended, for messages: "ended with exit code 3", "was ended by SIGKILL"."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def end_at_once(number: int) -> NoReturn:
    """End this process without cleaning up, at the second SIGTERM or SIGINT; any thread may call it.

    A process that a supervisor started leaves this to the supervisor, which kills its children at the second signal.

    Args:
        number: of the signal.
    """
    log.warning("%s again: ending at once", signal.Signals(number).name)
    os._exit(_SIGNALLED + number)
