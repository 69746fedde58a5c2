"""Garbage collection of a process that serves: seldom, and not over what lives as long as the process."""

from __future__ import annotations

import gc

#: Requests make no reference cycles, so collections find next to nothing; each costs its callers a pause.
THRESHOLDS = (50_000, 20, 50)


def freeze_gc() -> None:
    """Call once everything that stays has been built."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
