"""Lets SIGTERM end a block as an exception would, so that the terminal is restored on the way out."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

SIGNALLED = 128  # exit status of a shell's command that a signal ended, less the signal's number


@contextmanager
def unwound_by_sigterm() -> Iterator[None]:
    """Raise SystemExit(143) in the block when SIGTERM arrives; further ones are ignored. Only in the main thread."""

    def unwind(number: int, _frame: Any) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)
        raise SystemExit(SIGNALLED + number)

    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
