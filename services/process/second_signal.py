"""Ends a process at the second SIGTERM or SIGINT, while it still does what the first one asked for.

A process that a supervisor started leaves this to the supervisor, which kills its children at the second signal.
"""

from __future__ import annotations

import logging
import os
import signal
from typing import NoReturn

log = logging.getLogger("millstream.process")

SIGNALLED = 128  # exit status of a shell's command that a signal ended, less the signal's number: 143, 130


def end_at_once(number: int) -> NoReturn:
    """End this process without cleaning up. Any thread may call it.

    Args:
        number: of the second signal.
    """
    log.warning("%s again: ending at once", signal.Signals(number).name)
    os._exit(SIGNALLED + number)
