"""Worker ids: the name of a worker, and a start id that is unique for each start of its process.

cpu-0 (on one machine), cpu-0@web-1 (where hosts share a Redis)  ─> worker_id ─>  cpu-0@web-1-3f2a90c1d4e5b607

A supervisor chooses the start id, so that it can report the worker's death; a worker that was started alone draws one.
"""

from __future__ import annotations

import re
import secrets

HOST_CHARACTERS_MAX = 64  # of a host's name, as in Linux
_OTHER = re.compile(r"[^A-Za-z0-9._-]")  # than what a name of a worker may contain, which also names files


def new_start() -> str:
    """Return an id for one start of a process, unique on all machines and in all containers."""
    return secrets.token_hex(8)


def slot_of(index: int, host: str) -> str:
    """Return what distinguishes a worker from the others of its pool. `host`: "" if they all are on one machine."""
    return f"{index}@{_OTHER.sub('_', host)[:HOST_CHARACTERS_MAX]}" if host else str(index)


def read_slot(text: str) -> str:
    """Return the slot that N, N@HOST or HOST names."""
    index, _, host = text.partition("@")
    return slot_of(int(index), host) if index.isdecimal() else slot_of(0, text)


def worker_name(pool: str, slot: str) -> str:
    """Return the name of a worker, which stays the same when it is started again."""
    return f"{pool}-{slot}"


def worker_id(name: str, start: str) -> str:
    """Return the id of a worker: `name` is a `worker_name`, and `start` comes from `new_start`."""
    return f"{name}-{start}"


def name_of(worker: str) -> str:
    """Return the name of a worker by its id."""
    return worker.rpartition("-")[0]


def pool_of(worker: str) -> str:
    """Return the pool of a worker by its id. Names of pools and of hosts may have hyphens."""
    name = name_of(worker).partition("@")[0]
    return name.rpartition("-")[0]
