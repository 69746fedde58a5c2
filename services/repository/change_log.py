"""Which models changed between two tokens of a repository, so that readers need not look at all models.

<root>/.changes     one line for each change, oldest first: BEFORE AFTER MODEL (BEFORE, AFTER: ids in the token)

The log is a shortcut. Where it has a gap, because a process of another release changed the repository or a line could
not be written, readers look at all models.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from millstream.services.repository.disk import read_file

#: The log starts over beyond this size, and readers look at all models once.
LOG_BYTES_MAX = 64 << 10
NO_ID = "-"
_LINE = re.compile(r"([0-9a-f]{16}|-) ([0-9a-f]{16}) (\S+)")


class ChangeLog:
    """The log in the file at `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, before: str, after: str, model: str) -> None:
        """Note a change of `model` that is about to begin. The caller holds the repository's lock.

        A log that cannot be written is no error: it has a gap then.
        """
        with suppress(OSError):
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
            descriptor = os.open(self._path, flags, 0o644)
            try:
                if os.fstat(descriptor).st_size > LOG_BYTES_MAX:
                    os.ftruncate(descriptor, 0)
                # A line that a dead process cut short ends here.
                os.write(descriptor, f"\n{before} {after} {model}\n".encode())
            finally:
                os.close(descriptor)

    def between(self, seen: str, now: str, *, seen_unfinished: bool) -> set[str] | None:
        """Return the models that changed from one id to another; None if the log does not tell.

        Args:
            seen: id of the token at the last read.
            now: id of the token before this read; changes that were added since are returned, too.
            seen_unfinished: whether the change that led to `seen` was in progress at the last read.
        """
        if seen == now and not seen_unfinished:
            return set()
        try:
            lines = read_file(self._path, 2 * LOG_BYTES_MAX).decode(errors="replace").splitlines()
        except (OSError, ValueError):
            return None
        changed: set[str] = set()
        passed_now = False
        expected = None
        for line in filter(None, reversed(lines)):
            match = _LINE.fullmatch(line)
            if match is None or (expected is not None and match[2] != expected):
                return None
            before, after, model = match.groups()
            passed_now = passed_now or after == now
            if after == seen:
                return changed | {model} if passed_now and seen_unfinished else changed if passed_now else None
            changed.add(model)
            if before == seen and not seen_unfinished:
                return changed if passed_now else None
            expected = before
        return None
