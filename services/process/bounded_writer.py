"""Writes lines to a descriptor whose reader may stop reading: then lines are dropped and counted, and nothing waits.

line ─> the descriptor takes bytes? ─> write, at most PIPE_BUF bytes at a time
                                   └─> no, for STALL_S_MAX: drop ─> it takes some again: "N lines were dropped" first
A pipe that can be written to takes PIPE_BUF bytes without waiting (pipe(7)), and a terminal that is paused takes none.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable

STALL_S_MAX = 0.1  # for a reader that is slow, once: while it does not read, further lines wait for nothing


class BoundedWriter:
    """Writes lines to one descriptor. Not thread-safe: a log handler has a lock.

    Args:
        fd: the descriptor. It stays blocking: others may share its file, a terminal for instance.
        dropped: makes the line that says how many lines were dropped.
    """

    def __init__(self, fd: int, dropped: Callable[[int], bytes]) -> None:
        self._fd = fd
        self._dropped_line = dropped
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._dropped = 0
        self._cut = False  # whether the reader has only a part of the last line

    def write(self, line: bytes) -> None:
        """Write a line, or count it as dropped. Never raises: a reader may have closed its end."""
        try:
            if self._dropped:
                if not self._takes(0):
                    self._dropped += 1
                    return
                said, self._dropped = self._dropped, 0
                if not self._put((b"\n" if self._cut else b"") + self._dropped_line(said)):
                    self._dropped += said + 1
                    return
            if not self._put(line):
                self._dropped += 1
        except OSError:
            return

    def _put(self, data: bytes) -> bool:
        """Write all of `data`; False: its reader stalled, and has a part of it or none."""
        self._cut, rest = False, memoryview(data)
        while rest:
            if not self._takes(STALL_S_MAX):
                self._cut = len(rest) < len(data)
                return False
            rest = rest[os.write(self._fd, rest[: select.PIPE_BUF]) :]
        return True

    def _takes(self, seconds: float) -> bool:
        """Whether the descriptor takes bytes now, or within some seconds; also if a write would fail."""
        return bool(self._poll.poll(seconds * 1000))
