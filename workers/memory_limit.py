"""The memory that a worker may take. Beyond it an allocation fails, which is one failed run or load, not a dead machine.

RLIMIT_DATA, not RLIMIT_AS: since Linux 4.7 it counts what a process can write and does not share, wherever it was mapped
(getrlimit(2)). Shared memory of gateways, files that are only read and reserved address space, of which GPU libraries take
a hundred times the memory, do not count.
"""

from __future__ import annotations

import logging
import resource
from pathlib import Path

log = logging.getLogger("millstream.memory")

OOM_SCORE = 500  # added to the kernel's own, of at most 1000


def limit_memory(bytes_max: int) -> None:
    """From now on this process may have at most so many bytes of its own; 0: as many as it may now."""
    if not bytes_max:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = bytes_max if hard == resource.RLIM_INFINITY else min(bytes_max, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def go_first() -> None:
    """Let the kernel end this process before others when memory runs out: before gateways, Redis and their supervisor."""
    score = Path("/proc/self/oom_score_adj")
    try:
        score.write_text(str(min(1000, int(score.read_text()) + OOM_SCORE)))
    except (OSError, ValueError) as error:
        log.debug("the order in which the kernel ends processes stays as it is: %s", error)
