"""Estimates whether this machine has the memory for a larger trial. Imported by the checker process only.

When memory runs out the kernel kills the checker, and the model would be rejected for a batch that no worker runs.
"""

from __future__ import annotations

import resource
from pathlib import Path

#: approximate memory of all libraries before a model is loaded
_LIBRARIES_BYTES = 128 << 20
_MEMINFO = Path("/proc/meminfo")


def memory_allows(rows: int, largest: int) -> bool:
    """Return whether a run of `rows` rows may be tried after a run of `largest` rows, if memory grows with the rows.

    The growth must fit into half of the available memory. It is estimated from the peak so far, the model's weights
    included, and by a factor of 8 at most.
    """
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    growth = max(0, peak - _LIBRARIES_BYTES) * (min(rows / max(1, largest), 8.0) - 1)
    return growth <= available_bytes() / 2


def available_bytes(meminfo: Path = _MEMINFO) -> float:
    """Return the memory available without swapping (MemAvailable); infinity if the kernel does not report it."""
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return float("inf")
    return next((int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:")), float("inf"))
