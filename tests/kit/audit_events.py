"""What Python's own audit hooks see while a block runs: code, files, imports and processes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_DANGEROUS = ("open", "exec", "import", "os.", "subprocess.", "socket.", "ctypes.", "shutil.", "marshal.", "code.")
_seen: list[list[str]] = []


def _note(event: str, arguments: tuple[object, ...]) -> None:
    if _seen and event.startswith(_DANGEROUS):
        _seen[-1].append(f"{event} {str(arguments)[:100]}")


sys.addaudithook(_note)  # there is no way to remove one


@contextmanager
def dangerous_events() -> Iterator[list[str]]:
    """Return the events of this block that could hurt. What the block needs must have been imported before."""
    _seen.append([])
    try:
        yield _seen[-1]
    finally:
        _seen.pop()
