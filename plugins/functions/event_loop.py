"""An event loop for a confined process: threads wake it through a pipe, since the sandbox allows no sockets."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from typing import Any

_WAKE_BYTES = 4096


class PipeEventLoop(asyncio.SelectorEventLoop):
    """The event loop of asyncio with a pipe in place of its pair of sockets (asyncio.selector_events)."""

    def _make_self_pipe(self) -> None:
        loop: Any = self
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waking, False)
        loop._internal_fds += 1
        loop._add_reader(self._woken, self._read_from_self)

    def _close_self_pipe(self) -> None:
        loop: Any = self
        loop._remove_reader(self._woken)
        os.close(self._woken)
        os.close(self._waking)
        loop._internal_fds -= 1

    def _read_from_self(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._woken, _WAKE_BYTES)

    def _write_to_self(self) -> None:
        with suppress(OSError):  # it is full, and wakes the loop, or the loop is closed
            os.write(self._waking, b"\0")


class PipePolicy(asyncio.DefaultEventLoopPolicy):
    """Has `asyncio.run` and libraries make such loops, too."""

    _loop_factory = PipeEventLoop
