"""Whether this machine has processor time to spare, for work that can wait."""

from __future__ import annotations

import os
import re
from pathlib import Path

PRESSURE = Path("/proc/pressure/cpu")
#: Share of the last 10 s in which a task waited for a processor; above, the machine is busy (in percent).
STALLED_MAX = 20.0
LOAD_MAX = 0.7  # load of the last minute for each processor, where the kernel does not measure pressure
_SOME = re.compile(r"^some avg10=([0-9.]+)", re.MULTILINE)


def is_idle(pressure: Path = PRESSURE) -> bool:
    """Return whether few tasks wait for a processor. Reads one small file."""
    try:
        found = _SOME.search(pressure.read_text())
    except (OSError, UnicodeDecodeError):
        found = None
    if found is not None:
        return float(found.group(1)) <= STALLED_MAX
    return os.getloadavg()[0] <= LOAD_MAX * (os.cpu_count() or 1)
