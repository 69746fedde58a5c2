"""Worker ids: the pool and index of a worker, and a start id that is unique for each start of its process.

A supervisor chooses the start id, so that it can report the worker's death; a worker that was started alone draws one.
"""

from __future__ import annotations

import secrets


def new_start() -> str:
    """Return an id for one start of a process, unique on all machines and in all containers."""
    return secrets.token_hex(8)


def worker_id(name: str, start: str) -> str:
    """Return the id of a worker whose `name` is POOL-INDEX and whose `start` comes from `new_start`."""
    return f"{name}-{start}"


def pool_of(worker: str) -> str:
    """Return the pool of a worker that a supervisor started: its name is POOL-NUMBER."""
    return worker.rsplit("-", 2)[0]
