"""preloads: whether the supervisor still loads the models that its start command names.

supervisor: PreloadPipe ── read end, inherited (`--preload-fd`) ─> Preloads ─> ReadinessProbe
"""

from __future__ import annotations

import os


class Preloads:
    """The models that are loaded at the start of an installation.

    Args:
        fd: the read end of the supervisor's PreloadPipe, not blocking; None: no supervisor loads models.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd

    def loading(self) -> bool:
        """Whether models of the start are still being loaded. Never true again once it was false."""
        if self._fd is None:
            return False
        try:
            os.read(self._fd, 1)
        except BlockingIOError:
            return True
        os.close(self._fd)  # the end of the pipe
        self._fd = None
        return False
