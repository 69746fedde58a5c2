"""The processes of a group, as the kernel lists them."""

from __future__ import annotations

from pathlib import Path


def members(group: int) -> dict[int, str]:
    """Return the processes of a group that have not ended, with the names of their programs."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = status.read_text().rpartition(") ")
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid, _, name = before.partition(" (")
        state, _, of = after.split()[:3]
        if int(of) == group and state not in {"Z", "X"}:
            found[int(pid)] = name
    return found
