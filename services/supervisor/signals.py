"""The signals of a supervisor: SIGINT and SIGTERM stop it, SIGHUP replaces processes, SIGUSR2 has them log more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

from millstream.services.errors import Failure
from millstream.services.process.log_level import toggle_debug


class Signals:
    """Receives the signals of this process from `handle` on. Call it in a running event loop, in the main thread.

    `stops`: how often it was told to stop; `again`: set with the second time.

    Args:
        stop: called with the name of the first signal that stops it.
        kill: called with the second.
        restart: replaces all processes. Raises Failure, which it has shown.
        log_levels: the document that all processes follow.
        show: shows a line to the user.
    """

    def __init__(
        self,
        stop: Callable[[str], None],
        kill: Callable[[], None],
        restart: Callable[[], Awaitable[None]],
        log_levels: Path,
        show: Callable[[str], None],
    ) -> None:
        self.stops = 0
        self.again = asyncio.Event()
        self._stop = stop
        self._kill = kill
        self._restart = restart
        self._log_levels = log_levels
        self._show = show
        self._terminal = has_terminal()
        self._restarting: asyncio.Task[None] | None = None

    def handle(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_stop, number)
        loop.add_signal_handler(signal.SIGUSR2, self._on_verbose)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
            loop.add_signal_handler(signal.SIGHUP, self._on_hangup)

    def _on_stop(self, number: signal.Signals) -> None:
        self.stops += 1
        if self.stops > 1:
            self._show(f"{number.name} again: killing everything")
            self.again.set()
            self._kill()
            return
        self._show(f"{number.name}: answering requests in flight, then stopping (again to stop at once)")
        self._stop(number.name)

    def _on_verbose(self) -> None:
        """Have all processes log debug records, or no longer."""
        with contextlib.suppress(OSError):
            self._show(f"SIGUSR2: log level of all processes: {toggle_debug(self._log_levels)}")

    def _on_hangup(self) -> None:
        """Restart on `kill -HUP`; stop if the terminal was closed, for which the kernel sends the same signal."""
        if self._terminal and not has_terminal():
            self._on_stop(signal.SIGHUP)
            return
        self._show("SIGHUP: replacing all processes, one after the other")
        self._restarting = asyncio.create_task(self._try_restart(), name="SIGHUP")

    async def _try_restart(self) -> None:
        with contextlib.suppress(Failure):
            await self._restart()


def has_terminal() -> bool:
    """Return whether this process has a controlling terminal that is still open (tty(4))."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC))
    except OSError:
        return False
    return True
