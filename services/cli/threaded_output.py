"""Standard output that a thread writes: a command goes on while its reader does not, like a paused terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

from millstream.services.process.logs import descriptor_writer
from millstream.services.supervisor.own_log import LineWriter


class ThreadedOutput(io.TextIOBase):
    """A text stream that stands for standard output. Writing never waits, and raises nothing.

    Args:
        lost: makes the text that says how many pieces of text were lost, because they were not read in time.
    """

    def __init__(self, lost: Callable[[int], str]) -> None:
        super().__init__()
        self._lines = LineWriter(descriptor_writer(1), lost=lambda count: lost(count).encode())
        self._encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        self._terminal = sys.stdout is not None and sys.stdout.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._encoding

    def isatty(self) -> bool:
        return self._terminal

    def write(self, text: str) -> int:
        """Write text later, in the order of the calls."""
        if text:
            self._lines.write(text.encode(self._encoding, "backslashreplace"))
        return len(text)

    def close(self) -> None:
        """Wait for a moment until all is written."""
        if not self.closed:
            self._lines.close()
        super().close()
