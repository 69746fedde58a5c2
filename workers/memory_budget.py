"""memory_budget: the account of one worker's memory. No load begins before the memory that it takes is free.

load:    reserve (predicted bytes) ─> load ─> settle (measured bytes), or begin_unload + freed if the load failed
unload:  begin_unload ─> close, return freed memory ─> freed
used  =  max(what the account says, what the process really has)

The bytes of an instance that is being unloaded count until `freed`; if the process really has more than the account
says, because memory was not returned or a measurement was too low, that counts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from millstream.services.placement.views import Footprint
from millstream.services.process.memory_use import own_bytes

SPARE_BYTES = 16 << 20  # of a worker's budget: for requests, replies and records in the interpreter
MEMORY_OPTION = "--memory (MILLSTREAM_WORKER_MEMORY)"


class Measuring:
    """Whether a load was alone, besides runs of loaded models, while it was measured."""

    def __init__(self) -> None:
        self.alone = True


class MemoryBudget:
    """The memory of one worker process, by content id. Safe for several threads.

    Args:
        budget_bytes: memory that the process may use, the interpreter included; 0: no limit.
        real_bytes: returns the memory that the process really has; 0: unknown.
        spare_bytes: what the interpreter may take in addition for requests and records.
        follow: called before a load and after an unload, to correct the limit that the kernel enforces.
    """

    def __init__(
        self,
        budget_bytes: int,
        real_bytes: Callable[[], int] = own_bytes,
        spare_bytes: int = 0,
        follow: Callable[[], None] = lambda: None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._real_bytes = real_bytes
        self._spare = spare_bytes
        self._follow = follow
        self._lock = threading.Lock()
        self._base = real_bytes() + spare_bytes
        self._reserved: dict[str, Footprint] = {}  # loads in progress
        self._settled: dict[str, Footprint] = {}  # instances
        self._unloading: dict[str, int] = {}
        self._loaded_before = False
        self._measuring: list[Measuring] = []  # loads whose growth is being measured

    @property
    def base_bytes(self) -> int:
        """What the interpreter and the libraries take without any instance, and what is spared for them."""
        return self._base

    @property
    def room_bytes(self) -> int:
        """What all instances together can take; without a limit a number that is never reached."""
        return max(0, self.budget_bytes - self._base) if self.budget_bytes else 1 << 62

    @property
    def used_bytes(self) -> int:
        """What is in use, promised to loads in progress, or not yet free after an unload."""
        with self._lock:
            return self._used()

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.used_bytes) if self.budget_bytes else 1 << 62

    def footprint(self, content_id: str) -> Footprint | None:
        """Return what an instance takes, or what was reserved for its load; None: neither is there."""
        with self._lock:
            return self._settled.get(content_id) or self._reserved.get(content_id)

    def base_grew(self) -> bool:
        """Count what the process has now as its base: the library was imported. False, and no effect, later on."""
        with self._lock:
            if not self._loaded_before:
                self._base = max(self._base, self._real_bytes() + self._spare)
            return not self._loaded_before

    def reserve(self, content_id: str, footprint: Footprint) -> bool:
        """Reserve the bytes of a load; False if they are not free, and nothing is reserved.

        A second reservation of the same version replaces the first.
        """
        self._follow()
        with self._lock:
            before = self._reserved.pop(content_id, None)
            if not self.budget_bytes or self._used() + footprint.load_bytes <= self.budget_bytes:
                self._reserved[content_id] = footprint
                return True
            if before is not None:
                self._reserved[content_id] = before
            return False

    def settle(self, content_id: str, measured: Footprint) -> None:
        """Replace the reservation of a load by what its instance takes; also corrects that of a loaded instance."""
        with self._lock:
            self._reserved.pop(content_id, None)
            self._settled[content_id] = measured
            self._loaded_before = True
        self._follow()

    def begin_unload(self, content_id: str) -> None:
        """Begin to unload an instance, or to abandon a load: its bytes count until `freed`."""
        with self._lock:
            reserved, settled = self._reserved.pop(content_id, None), self._settled.pop(content_id, None)
            self._loaded_before = True
            if settled:
                self._disturb()
            bytes_held = (reserved.load_bytes if reserved else 0) + (settled.resident_bytes if settled else 0)
            self._unloading[content_id] = self._unloading.get(content_id, 0) + bytes_held

    def freed(self, content_id: str) -> None:
        """Record that an instance was closed and its memory returned to the system."""
        with self._lock:
            self._unloading.pop(content_id, None)
        self._follow()

    @contextmanager
    def measuring(self) -> Iterator[Measuring]:
        """Note whether other loads or unloads change the process' memory while the block measures it."""
        current = Measuring()
        with self._lock:
            self._measuring.append(current)
            if len(self._measuring) > 1 or self._unloading:
                self._disturb()
        try:
            yield current
        finally:
            with self._lock:
                self._measuring.remove(current)

    def _disturb(self) -> None:
        for one in self._measuring:
            one.alone = False

    def _used(self) -> int:
        accounted = (
            self._base
            + sum(footprint.resident_bytes for footprint in self._settled.values())
            + max((footprint.peak_bytes for footprint in self._settled.values()), default=0)  # one batch runs at a time
            + sum(footprint.load_bytes for footprint in self._reserved.values())
            + sum(self._unloading.values())
        )
        return max(accounted, self._real_bytes())
