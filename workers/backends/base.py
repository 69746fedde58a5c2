"""What an inference library must offer to serve: one function that loads, one object that runs.

load(path, signature, device, threads) -> Instance ── run({name: array}) ──> [array, …] ── close()
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature

Array = np.ndarray[Any, Any]


class OutOfMemory(Failure):
    """A run found no memory. With fewer rows it may."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.MODEL, message)


class Terminated(Failure):
    """A run was ended by `Instance.terminate`."""

    def __init__(self) -> None:
        super().__init__(Code.MODEL, "the run was ended before it was over")


class Stop:
    """A request to end a load or a warm-up early, from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end: Callable[[], None] = lambda: None
        self.reason = ""  # why; empty: nobody asked for it

    def by(self, end: Callable[[], None]) -> None:
        """`end` ends what the load does from here on. Called at once if it was asked for already."""
        with self._lock:
            self._end = end
            asked = bool(self.reason)
        if asked:
            end()

    def ask(self, reason: str) -> None:
        """End the load, for `reason`. The first reason counts."""
        with self._lock:
            self.reason = self.reason or reason
            end = self._end
        end()


class Instance(Protocol):
    """A loaded variant on a device. Not shared between threads."""

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Run once. `inputs`: by name; BF16 as uint16, BYTES as object arrays of `bytes`.

        Returns all outputs in the signature's order, same conventions. Raises Failure(MODEL) with the library's
        own message when the model fails on these inputs, OutOfMemory when there is no memory for them.
        """

    def terminate(self) -> None:
        """End the run that is under way in another thread, as soon as the library can; it raises Terminated.

        One that ended by itself meanwhile leaves it to the next run, which may raise Terminated at once.
        """

    def rebuild(self) -> None:
        """Begin anew, with no memory of earlier runs. Raises Failure when that cannot be done."""

    @property
    def size_bytes(self) -> int:
        """Resident bytes that this instance added to the process, as far as they are known."""

    def close(self) -> None:
        """Give everything back to the system."""


class Backend(Protocol):
    """An inference library. Importing its module must not import the library."""

    name: str

    def load(self, path: Path, signature: Signature, device: str, threads: int, stop: Stop | None = None) -> Instance:
        """Load the model file at `path` on `device` ("cpu", "cuda:0", "tensorrt:0"). `stop` may end it early.

        Raises Failure(MODEL) if it cannot be loaded, Failure(UNAVAILABLE) if the device cannot be used: a backend
        never falls back to another device by itself.
        """
