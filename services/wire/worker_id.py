"""What a worker is called in Redis: its pool and index, and what tells this process from every other.

A supervisor, which says so when it sees a worker die, gives the worker that part; one that was started alone draws it.
"""

from __future__ import annotations

import secrets


def new_start() -> str:
    """What tells one start of a process from all others, on any machine and in any container."""
    return secrets.token_hex(8)


def worker_id(name: str, start: str) -> str:
    """`name`: its pool and index. `start`: from `new_start`."""
    return f"{name}-{start}"


def pool_of(worker: str) -> str:
    """The pool of a worker that a supervisor started: its name there is POOL-NUMBER."""
    return worker.rsplit("-", 2)[0]
