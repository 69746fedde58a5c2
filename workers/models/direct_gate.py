"""Tells an unload whether batches of a version are in hand that were dispatched directly, and admits no more."""

from __future__ import annotations


class DirectGate:
    """One for each load of a version. Redis does not know of these batches, so `release_lane` cannot see them.

    The main loop enters before it looks whether the gate is closed, and an unload closes it before it looks whether
    anything is inside: at least one of them sees the other.
    """

    __slots__ = ("closed", "inside")

    def __init__(self) -> None:
        self.closed = False  # written by unloads
        self.inside = 0  # written by the main loop

    def enter(self) -> bool:
        """Count a batch; False: the version is being unloaded, and the batch is not counted."""
        self.inside += 1
        if self.closed:
            self.inside -= 1
            return False
        return True

    def leave(self) -> None:
        """Count a batch as answered."""
        self.inside -= 1

    def close(self) -> bool:
        """Admit no more batches; False, and the gate stays open, if one is inside."""
        self.closed = True
        if self.inside:
            self.closed = False
            return False
        return True
