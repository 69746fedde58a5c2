"""Writes a byte every two seconds to the supervisor, which replaces this process when the bytes end.

gateway, controller: a task of the event loop ─┐
worker: a thread ──────────────────────────────┴─> pipe (`--life-fd`) ─> services/supervisor/liveness.py
"""

from __future__ import annotations

import os
import threading
import time

from millstream.services.process.waits import next_tick

EVERY_S = 2.0  # between two signs


class SignOfLife:
    """The write end of a pipe to the supervisor.

    Args:
        fd: inherited from the supervisor; None: no supervisor started this process.
    """

    def __init__(self, fd: int | None) -> None:
        self._fd = fd
        if fd is not None:
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)  # a program that outlives this process must not look like it

    def start_thread(self) -> None:
        """Show signs from a thread: they prove that threads of this process get the interpreter's lock."""
        if self._fd is not None:
            threading.Thread(target=self._run, name="sign of life", daemon=True).start()

    async def show_always(self) -> None:
        """Show signs from the event loop: they prove that it turns."""
        while self._show():
            await next_tick(EVERY_S)

    def _run(self) -> None:
        while self._show():
            time.sleep(EVERY_S)

    def _show(self) -> bool:
        """Show one sign; returns False if there is nobody to see it."""
        if self._fd is None:
            return False
        try:
            os.write(self._fd, b".")
        except BlockingIOError:  # a supervisor that does not read now will find older signs
            return True
        except OSError:
            return False
        return True
