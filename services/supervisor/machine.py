"""What the supervisor asks of the machine that it runs on."""

from __future__ import annotations

import os


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal that is still open (tty(4))."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
