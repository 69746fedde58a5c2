"""Whether this machine has the memory for a larger trial. Imported by the checker process only.

The kernel ends the process that takes the last memory, and the model would be refused for what a worker never runs.
"""

from __future__ import annotations

import resource
from pathlib import Path

#: what all libraries take before a model is loaded, about
_LIBRARIES_BYTES = 128 << 20
_MEMINFO = Path("/proc/meminfo")


def room_for(rows: int, largest: int) -> bool:
    """Whether a run of `rows` rows may be tried after one of `largest`, if memory grows with the rows.

    Half of what is available must do: the model itself is counted as if it grew, too, up to eight times.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    growth = max(0, peak - _LIBRARIES_BYTES) * (min(rows / max(1, largest), 8.0) - 1)
    return growth <= available_bytes() / 2


def available_bytes(meminfo: Path = _MEMINFO) -> float:
    """Memory that the kernel could give without swapping; infinite where it does not say."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return float("inf")
    return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:")), float("inf"))
