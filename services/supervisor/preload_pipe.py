"""Tells gateways when the models of the start are loaded: by the end of a pipe, on which nothing is ever written.

A gateway that is restarted later inherits the same read end, and a supervisor that dies closes the write end: no state
can be left behind that keeps a gateway from becoming ready.
"""

from __future__ import annotations

import asyncio
import logging
import os

from millstream.services.supervisor.own_log import LOGGER

log = logging.getLogger(LOGGER)

#: longest time for which models of the start keep gateways from being ready; the start continues to load them
PRELOADS_S_MAX = 300.0


class PreloadPipe:
    """A pipe that ends with `end_loading`, or `limit_s` after its creation. Create it inside a running event loop.

    Gateways inherit `read_fd`, which does not block.
    """

    def __init__(self, limit_s: float) -> None:
        self.read_fd, self._write_fd = os.pipe()
        os.set_blocking(self.read_fd, False)
        self._limit_s = limit_s
        self._timer = asyncio.get_running_loop().call_later(limit_s, self._give_up)

    def end_loading(self) -> None:
        """Let gateways be ready."""
        self._timer.cancel()
        if self._write_fd >= 0:
            os.close(self._write_fd)
            self._write_fd = -1

    def close(self) -> None:
        """Close both ends, when no further gateway is to be started."""
        self.end_loading()
        if self.read_fd >= 0:
            os.close(self.read_fd)
            self.read_fd = -1

    def _give_up(self) -> None:
        log.warning("models are still being loaded after %g s: gateways become ready without them", self._limit_s)
        self.end_loading()
