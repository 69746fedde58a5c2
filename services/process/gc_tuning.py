"""Garbage collection: rare in a serving process, and without the objects that live as long as the process."""

from __future__ import annotations

import atexit
import gc

#: Requests create no reference cycles, so that collections free next to nothing, but each pauses all requests.
THRESHOLDS = (50_000, 20, 50)


def collect_rarely() -> None:
    """Set the thresholds; before the imports, whose objects stay: collections took a tenth of a gateway's start."""
    gc.set_threshold(*THRESHOLDS)


def exit_without_gc() -> None:
    """Exclude all objects from the collections of the interpreter's end: they free what the end of the process frees.

    They took a fifth of a short command's CPU time.
    """
    atexit.register(gc.freeze)


def freeze_gc() -> None:
    """Exclude all current objects from collections; to be called after everything permanent was built."""
    gc.collect()
    gc.freeze()
    collect_rarely()
