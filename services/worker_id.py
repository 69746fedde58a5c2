"""What a worker is called in Redis. Its supervisor, which sees it die, comes to the same name."""

from __future__ import annotations

import platform
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def worker_id(name: str, pid: int) -> str:
    """`name`: its pool and index. The machine is part of it: supervisors on two hosts may share one Redis."""
    machine = _BOOT_ID.read_text()[:8] if _BOOT_ID.exists() else platform.node()
    return f"{name}-{machine}-{pid}"


def pool_of(worker: str) -> str:
    """The pool of a worker that a supervisor started: its name there is POOL-NUMBER."""
    return worker.rsplit("-", 3)[0]
