"""Limits the memory of a worker: beyond the limit an allocation fails, which fails one run or load, not the machine.

RLIMIT_DATA is used, not RLIMIT_AS: since Linux 4.7 it counts private writable memory, however it was mapped
(getrlimit(2)). It does not count the gateways' shared memory, files mapped read-only, and reserved address space, of
which GPU libraries take a hundred times the memory that they use.
"""

from __future__ import annotations

import logging
import resource
from pathlib import Path

log = logging.getLogger("millstream.memory")

OOM_SCORE = 500  # added to the kernel's own score, which is at most 1000


def limit_memory(bytes_max: int) -> None:
    """Limit the private memory of this process to `bytes_max`; 0 leaves the limit as it is."""
    if not bytes_max:
        return
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = bytes_max if hard == resource.RLIM_INFINITY else min(bytes_max, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def prefer_for_oom_kill() -> None:
    """Let the kernel's out-of-memory killer choose this process before gateways, Redis and the supervisor."""
    score = Path("/proc/self/oom_score_adj")
    try:
        score.write_text(str(min(1000, int(score.read_text()) + OOM_SCORE)))
    except (OSError, ValueError) as error:
        log.debug("the score of the out-of-memory killer cannot be set: %s", error)
