"""The account of one worker's memory. No load begins before the memory that it takes is free.

load:    reserve (predicted bytes) ─> load ─> settle (measured bytes), or begin_unload + freed if the load failed
unload:  begin_unload ─> close, return freed memory ─> freed
used  =  max(what the account says, what the process really has)

The bytes of an instance that is being unloaded count until `freed`; if the process really has more than the account
says, because memory was not returned or a measurement was too low, that counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from millstream.services.placement.views import Footprint
from millstream.services.process.process_memory import own_bytes
from millstream.services.sizes import sizes

SPARE_BYTES = 16 << 20  # of a worker's budget: for requests, replies and records in the interpreter
MEMORY_OPTION = "--memory (MILLSTREAM_WORKER_MEMORY)"
DEVICE_MEMORY_OPTION = "device_memory of its --pool"


class DeviceBudget(NamedTuple):
    """The memory of an accelerator that one worker may use.

    Args:
        budget_bytes: 0: no limit.
        real_bytes: returns what the process really has of it; 0: unknown.
    """

    budget_bytes: int
    real_bytes: Callable[[], int] = lambda: 0


class Measuring:
    """Whether a load was alone, besides runs of loaded models, while it was measured."""

    def __init__(self) -> None:
        self.alone = True


class MemoryBudget:
    """The memory of one worker process, by content id. Safe for several threads.

    `spare`: the accounts of work in the background, which ends for loads.

    Args:
        budget_bytes: memory that the process may use, the interpreter included; 0: no limit.
        real_bytes: returns the memory that the process really has; 0: unknown.
        spare_bytes: what the interpreter may take in addition for requests and records.
        follow: called before a load and after an unload, to correct the limit that the kernel enforces.
        device: the memory of its accelerator; None: it has none, or there is no limit.
    """

    def __init__(
        self,
        budget_bytes: int,
        real_bytes: Callable[[], int] = own_bytes,
        spare_bytes: int = 0,
        follow: Callable[[], None] = lambda: None,
        device: DeviceBudget | None = None,
    ) -> None:
        self.budget_bytes = budget_bytes
        self._real_bytes = real_bytes
        self._spare = spare_bytes
        self._follow = follow
        self._device = device or DeviceBudget(0)
        self.spare: list[SpareMemory] = []
        self._lock = threading.Lock()
        self._base = real_bytes() + spare_bytes
        self._device_base = self._device.real_bytes()
        self._reserved: dict[str, Footprint] = {}  # loads in progress
        self._settled: dict[str, Footprint] = {}  # instances
        self._unloading: dict[str, list[tuple[int, int]]] = {}  # bytes of the host and of the device, the oldest first
        self._loaded_before = False
        self._measuring: list[Measuring] = []  # loads whose growth is being measured
        #: of the host and of the device, by the account; None: it changed. With 1,000 instances a sum takes 0.5 ms.
        self._accounted: tuple[int, int] | None = None

    @property
    def base_bytes(self) -> int:
        """What the interpreter and the libraries take without any instance, and what is spared for them."""
        return self._base

    @property
    def device_base_bytes(self) -> int:
        """What the process takes of the device without any instance."""
        return self._device_base

    @property
    def room_bytes(self) -> int:
        """What all instances together can take; without a limit a number that is never reached."""
        return max(0, self.budget_bytes - self._base) if self.budget_bytes else 1 << 62

    @property
    def device_budget_bytes(self) -> int:
        """Memory of the device that the process may use; 0: it has no device, or there is no limit."""
        return self._device.budget_bytes

    @property
    def device_room_bytes(self) -> int:
        """What all instances together can take of the device; without a limit a number that is never reached."""
        return max(0, self.device_budget_bytes - self._device_base) if self.device_budget_bytes else 1 << 62

    @property
    def used_bytes(self) -> int:
        """What is in use, promised to loads in progress, or not yet free after an unload."""
        with self._lock:
            return self._used()

    @property
    def device_used_bytes(self) -> int:
        """Likewise of the device."""
        with self._lock:
            return self._device_used()

    @property
    def leaving_bytes(self) -> tuple[int, int]:
        """What of the host and of the device is not yet free after an unload."""
        with self._lock:
            leaving = [one for unloads in self._unloading.values() for one in unloads]
            return sum(host for host, _ in leaving), sum(device for _, device in leaving)

    @property
    def device_free_bytes(self) -> int:
        return max(0, self.device_budget_bytes - self.device_used_bytes) if self.device_budget_bytes else 1 << 62

    @property
    def over_bytes(self) -> tuple[int, int]:
        """By how much what is in use exceeds the budgets of the host and of the device; 0: it does not."""
        over = self.used_bytes - self.budget_bytes if self.budget_bytes else 0
        device = self.device_used_bytes - self.device_budget_bytes if self.device_budget_bytes else 0
        return max(0, over), max(0, device)

    def too_large(self, need: Footprint) -> str:
        """Return which number is larger than the memory for models, with both numbers; "": it fits without others."""
        if need.load_bytes > self.room_bytes:
            takes, has = sizes(need.load_bytes, self.room_bytes)
            return f"it takes {takes} of memory, and this worker has {has} for models: raise {MEMORY_OPTION}"
        if need.device_load_bytes > self.device_room_bytes:
            takes, has = sizes(need.device_load_bytes, self.device_room_bytes)
            return (
                f"it takes {takes} of device memory, and this worker has {has} for models: raise {DEVICE_MEMORY_OPTION}"
            )
        return ""

    def within(self, need: Footprint, share: float) -> bool:
        """Return whether a load leaves the other part of both budgets free."""
        fits = not self.budget_bytes or self.used_bytes + need.load_bytes <= share * self.budget_bytes
        device_bytes = self.device_budget_bytes
        return fits and (not device_bytes or self.device_used_bytes + need.device_load_bytes <= share * device_bytes)

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.used_bytes) if self.budget_bytes else 1 << 62

    def footprint(self, content_id: str) -> Footprint | None:
        """Return what an instance takes, or what was reserved for its load; None: neither is there."""
        with self._lock:
            return self._settled.get(content_id) or self._reserved.get(content_id)

    def footprints(self) -> dict[str, Footprint]:
        """Return the same as `footprint` for all instances and loads."""
        with self._lock:
            return self._reserved | self._settled

    def base_grew(self) -> bool:
        """Count what the process has now as its base: the library was imported. False, and no effect, later on.

        From the beginning of the first load on, what the process has contains a model.
        """
        with self._lock:
            if not self._loaded_before:
                self._base = max(self._base, self._real_bytes() + self._spare)
                self._device_base = max(self._device_base, self._device.real_bytes())
                self._accounted = None
            return not self._loaded_before

    def reserve(self, content_id: str, footprint: Footprint) -> bool:
        """Reserve the bytes of a load; False if they are not free, and nothing is reserved.

        A second reservation of the same version replaces the first.
        """
        self._follow()
        with self._lock:
            before = self._reserved.pop(content_id, None)
            self._accounted = None
            fits = self._has_room(footprint)
            reserved = footprint if fits else before
            if reserved is not None:
                self._reserved[content_id] = reserved
                self._accounted = None
            return fits

    def settle(self, content_id: str, measured: Footprint) -> None:
        """Replace the reservation of a load by what its instance takes; also corrects that of a loaded instance."""
        with self._lock:
            self._reserved.pop(content_id, None)
            self._settled[content_id] = measured
            self._accounted = None
            self._loaded_before = True
        self._follow()

    def begin_unload(self, content_id: str) -> None:
        """Begin to unload an instance, or to abandon a load: its bytes count until `freed`."""
        with self._lock:
            reserved, settled = self._reserved.pop(content_id, None), self._settled.pop(content_id, None)
            self._loaded_before = True
            if settled:
                self._disturb()
            host = (reserved.load_bytes if reserved else 0) + (settled.resident_bytes if settled else 0)
            device = (reserved.device_load_bytes if reserved else 0) + (settled.device_resident_bytes if settled else 0)
            self._unloading.setdefault(content_id, []).append((host, device))
            self._accounted = None

    def freed(self, content_id: str) -> None:
        """Record that an instance was closed and its memory returned to the system."""
        with self._lock:
            unloading = self._unloading.get(content_id)
            if unloading:
                del unloading[0]
            if not unloading:
                self._unloading.pop(content_id, None)
            self._accounted = None
        self._follow()

    @contextmanager
    def measuring(self) -> Iterator[Measuring]:
        """Note whether other loads or unloads change the process' memory while the block measures it."""
        current = Measuring()
        with self._lock:
            self._loaded_before = True
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

    def _has_room(self, need: Footprint) -> bool:
        fits = not self.budget_bytes or self._used() + need.load_bytes <= self.budget_bytes
        device_bytes = self.device_budget_bytes
        return fits and (not device_bytes or self._device_used() + need.device_load_bytes <= device_bytes)

    def _used(self) -> int:
        return max(self._account()[0], self._real_bytes())

    def _device_used(self) -> int:
        return max(self._account()[1], self._device.real_bytes())

    def _account(self) -> tuple[int, int]:
        """Return the bytes of the host and of the device that the account says are in use."""
        if self._accounted is None:
            settled, reserved = self._settled.values(), self._reserved.values()
            unloading = [one for unloads in self._unloading.values() for one in unloads]
            # The peaks: one batch runs at a time.
            host = self._base + sum([one.resident_bytes for one in settled])
            host += max([one.peak_bytes for one in settled], default=0)
            host += sum([one.load_bytes for one in reserved]) + sum([host for host, _ in unloading])
            device = self._device_base + sum([one.device_resident_bytes for one in settled])
            device += max([one.device_peak_bytes for one in settled], default=0)
            device += sum([one.device_load_bytes for one in reserved]) + sum([device for _, device in unloading])
            self._accounted = host, device
        return self._accounted


GIVE_WAY_S_MAX = 2.0  # that a load waits for stopped work to be gone; then it is tried again
#: For stopped work to be gone; then loads count its memory as taken. It has the lowest priority, also for its end.
GIVING_WAY_S_MAX = 30.0


class SpareMemory:
    """The memory of one kind of work in the background, of which one piece runs at a time. Safe for several threads.

    Args:
        stop: stops the work in progress, if there is any. Called by the thread that needs the memory.
    """

    def __init__(
        self, budget: MemoryBudget, stop: Callable[[], None], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._budget = budget
        self._stop = stop
        self._monotonic = monotonic
        self._freed = threading.Condition()
        budget.spare.append(self)
        self._account = ""  # of the reservation; empty: there is none
        self._asked: float | None = None  # when a load needed the memory first; None: none did

    def asked(self) -> bool:
        """Whether a load needs the memory of the work in progress, which must not go on."""
        return self._asked is not None

    @property
    def giving_way(self) -> bool:
        """Whether memory that a load needs is about to be free."""
        with self._freed:
            asked = self._asked
            return bool(self._account) and asked is not None and self._monotonic() - asked < GIVING_WAY_S_MAX

    def reserve(self, account: str, footprint: Footprint) -> bool:
        """Reserve memory for a piece of work; False if it is not free. `account`: its name in the budget."""
        with self._freed:
            self._asked = None
            reserved = self._budget.reserve(account, footprint)
            self._account = account if reserved else ""
            return reserved

    def free(self) -> None:
        """Return the memory. Called once the processes of the work are gone; calling it again does nothing."""
        with self._freed:
            account, self._account = self._account, ""
            if account:
                self._budget.begin_unload(account)
                self._budget.freed(account)
                self._freed.notify_all()

    def give_way(self) -> bool:
        """Stop the work in progress, and return whether its memory is free now; False also if there was none."""
        with self._freed:
            if not self._account:
                return False
            if self._asked is None:
                self._asked = self._monotonic()
        self._stop()
        with self._freed:
            return self._freed.wait_for(lambda: not self._account, GIVE_WAY_S_MAX)
