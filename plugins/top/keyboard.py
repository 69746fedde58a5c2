"""Waits for a key instead of only for time to pass, where standard input is a terminal."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn


@contextmanager
def keyboard() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits for a key, at most this many seconds, and returns it; "" if none was pressed.

    In the block, keys are read at once and are not shown; Ctrl-C interrupts as usual. The terminal is restored.
    """
    if not sys.stdin.isatty():
        yield _sleep
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield _pressed
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _sleep(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _pressed(seconds: float) -> str:
    fd = sys.stdin.fileno()
    ready, _, _ = select.select([fd], [], [], seconds)
    if not ready:
        return ""
    pressed = os.read(fd, 64)
    if not pressed:  # the terminal is gone: select would return at once, again and again
        raise KeyboardInterrupt
    return pressed.decode(errors="replace")[0]


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
