"""The account of one worker's memory. No load begins before the memory that it takes is free.

load:    reserve (predicted bytes) ─> load ─> settle (measured bytes), or begin_unload + freed if the load failed
unload:  begin_unload ─> close, return freed memory ─> freed
used  =  max(what the account says, what the process and those of its instances really have)

The bytes of an instance that is being unloaded count until `freed`; if the process really has more than the account
says, because memory was not returned or a measurement was too low, that counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from millstream.services.placement.views import Footprint
from millstream.services.process.process_memory import own_bytes
from millstream.services.sizes import sizes

SPARE_BYTES = 16 << 20  # of a worker's budget: for requests, replies and records in the interpreter
MEMORY_OPTION = "--memory (MILLSTREAM_WORKER_MEMORY)"
DEVICE_MEMORY_OPTION = "device_memory of its --pool"


UNLIMITED_BYTES = 1 << 62
_NOTHING = Footprint(0)
_Bytes = tuple[int, int]  # resident, peak


class MemorySpace:
    """One kind of memory of a worker: of its process, or of its accelerator.

    Args:
        budget_bytes: what it may use, the interpreter included; 0: no limit, or there is no accelerator.
        real_bytes: returns what the process really has of it; 0: unknown.
        spare_bytes: what the interpreter may take in addition for requests and records.

    Attributes:
        base_bytes: what the interpreter and the libraries take without any instance, and what is spared for them.
        accounted_bytes: what the account says is in use.
        leaving_bytes: what is not yet free after an unload.
        apart_bytes: what instances take in other processes, when it was measured last.
    """

    def __init__(self, budget_bytes: int, real_bytes: Callable[[], int] = lambda: 0, spare_bytes: int = 0) -> None:
        self.budget_bytes = budget_bytes
        self.base_bytes = self.accounted_bytes = real_bytes() + spare_bytes
        self.leaving_bytes = self.apart_bytes = 0
        self._real_bytes = real_bytes
        self._spare_bytes = spare_bytes

    @property
    def room_bytes(self) -> int:
        """What all instances together can take; without a limit a number that is never reached."""
        return max(0, self.budget_bytes - self.base_bytes) if self.budget_bytes else UNLIMITED_BYTES

    @property
    def used_bytes(self) -> int:
        """What is in use, promised to loads in progress, or not yet free after an unload."""
        return max(self.accounted_bytes, self._real_bytes() + self.apart_bytes)

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.used_bytes) if self.budget_bytes else UNLIMITED_BYTES

    @property
    def over_bytes(self) -> int:
        """By how much what is in use exceeds the budget; 0: it does not."""
        return max(0, self.used_bytes - self.budget_bytes) if self.budget_bytes else 0

    def fits(self, size_bytes: int, share: float = 1.0, instead_of_bytes: int = 0) -> bool:
        """Return whether a load leaves the other part of the budget free, maybe instead of what is reserved for it."""
        used_bytes = max(self.accounted_bytes - instead_of_bytes, self._real_bytes() + self.apart_bytes)
        return not self.budget_bytes or used_bytes + size_bytes <= share * self.budget_bytes

    def grow_base(self) -> None:
        """Count what the process has now as what it takes without any instance."""
        self.base_bytes = max(self.base_bytes, self._real_bytes() + self._spare_bytes)

    def account(self, settled: Sequence[_Bytes], reserved: Sequence[_Bytes], leaving: Sequence[int]) -> None:
        """Count instances, loads and what is being unloaded. Of the peaks the largest: one batch runs at a time."""
        self.leaving_bytes = sum(leaving)
        self.accounted_bytes = (
            self.base_bytes
            + sum([resident for resident, _ in settled])
            + max([peak for _, peak in settled], default=0)
            + sum([resident + peak for resident, peak in reserved])
            + self.leaving_bytes
        )


class Measuring:
    """Whether a load was alone, besides runs of loaded models, while it was measured."""

    def __init__(self) -> None:
        self.alone = True


class MemoryBudget(MemorySpace):
    """The memory of one worker process, by content id, and of its accelerator. Safe for several threads.

    `spare`: the accounts of work in the background, which ends for loads.

    Args:
        follow: called before a load and after an unload, to correct the limit that the kernel enforces; it gets what
            instances take in other processes.
        device: the memory of its accelerator; None: it has none, or there is no limit.
    """

    def __init__(
        self,
        budget_bytes: int,
        real_bytes: Callable[[], int] = own_bytes,
        spare_bytes: int = 0,
        follow: Callable[[int], None] = lambda _: None,
        device: MemorySpace | None = None,
    ) -> None:
        super().__init__(budget_bytes, real_bytes, spare_bytes)
        self.device = device or MemorySpace(0)
        self._follow = follow
        self.spare: list[SpareMemory] = []
        self._lock = threading.Lock()
        self._reserved: dict[str, Footprint] = {}  # loads in progress
        self._settled: dict[str, Footprint] = {}  # instances
        self._apart: dict[str, tuple[int, int]] = {}  # bytes in other processes: after the load, and now
        self._unloading: dict[str, list[tuple[int, int]]] = {}  # bytes of the host and of the device, the oldest first
        self._loaded_before = False
        self._measuring: list[Measuring] = []  # loads whose growth is being measured

    def too_large(self, need: Footprint) -> str:
        """Return which number is larger than the memory for models, with both numbers; "": it fits without others."""
        if need.load_bytes > self.room_bytes:
            takes, has = sizes(need.load_bytes, self.room_bytes)
            return f"it takes {takes} of memory, and this worker has {has} for models: raise {MEMORY_OPTION}"
        if need.device_load_bytes > self.device.room_bytes:
            takes, has = sizes(need.device_load_bytes, self.device.room_bytes)
            return (
                f"it takes {takes} of device memory, and this worker has {has} for models: raise {DEVICE_MEMORY_OPTION}"
            )
        return ""

    def within(self, need: Footprint, share: float) -> bool:
        """Return whether a load leaves the other part of both budgets free."""
        return self.fits(need.load_bytes, share) and self.device.fits(need.device_load_bytes, share)

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
                for space in (self, self.device):
                    space.grow_base()
                self._count()
            return not self._loaded_before

    def reserve(self, content_id: str, footprint: Footprint) -> bool:
        """Reserve the bytes of a load; False if they are not free, and nothing is reserved.

        A second reservation of the same version replaces the first.
        """
        self._follow(self.apart_bytes)
        with self._lock:
            before = self._reserved.get(content_id, _NOTHING)
            fits = self.fits(footprint.load_bytes, instead_of_bytes=before.load_bytes)
            fits &= self.device.fits(footprint.device_load_bytes, instead_of_bytes=before.device_load_bytes)
            if fits:
                self._reserved[content_id] = footprint
                self._count()
            return fits

    def settle(self, content_id: str, measured: Footprint) -> None:
        """Replace the reservation of a load by what its instance takes; also corrects that of a loaded instance."""
        with self._lock:
            self._reserved.pop(content_id, None)
            self._settled[content_id] = measured
            self._loaded_before = True
            self._count()
        self._follow(self.apart_bytes)

    def measured_apart(self, sizes_bytes: Mapping[str, int]) -> None:
        """Count what instances take in other processes now, by content id, instead of what they took before."""
        with self._lock:
            for content_id, size_bytes in sizes_bytes.items():
                known = self._settled.get(content_id)
                if known is not None:
                    loaded_bytes, _ = self._apart.get(content_id, (known.resident_bytes, 0))
                    self._apart[content_id] = loaded_bytes, size_bytes
                    self._settled[content_id] = replace(known, resident_bytes=size_bytes)
            self._count()
        self._follow(self.apart_bytes)

    def most_grown(self) -> tuple[str, int] | None:
        """Return the instance that grew most since its load, and by how many bytes, if such growth is why the budget
        is exceeded.
        """
        with self._lock:
            grown = {one: max(0, now - loaded) for one, (loaded, now) in self._apart.items()}
            over_bytes = self.over_bytes
            if over_bytes <= SPARE_BYTES or sum(grown.values()) < over_bytes:
                return None
            most = max(grown, key=lambda one: grown[one])
            return most, grown[most]

    def begin_unload(self, content_id: str) -> None:
        """Begin to unload an instance, or to abandon a load: its bytes count until `freed`."""
        with self._lock:
            reserved, settled = self._reserved.pop(content_id, None), self._settled.pop(content_id, None)
            self._apart.pop(content_id, None)
            self._loaded_before = True
            if settled:
                self._disturb()
            load, instance = reserved or _NOTHING, settled or _NOTHING
            host = load.load_bytes + instance.resident_bytes
            device = load.device_load_bytes + instance.device_resident_bytes
            self._unloading.setdefault(content_id, []).append((host, device))
            self._count()

    def freed(self, content_id: str) -> None:
        """Record that an instance was closed and its memory returned to the system."""
        with self._lock:
            unloading = self._unloading.get(content_id)
            if unloading:
                del unloading[0]
            if not unloading:
                self._unloading.pop(content_id, None)
            self._count()
        self._follow(self.apart_bytes)

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

    def _count(self) -> None:
        settled, reserved = self._settled.values(), self._reserved.values()
        unloading = [one for unloads in self._unloading.values() for one in unloads]
        self.apart_bytes = sum([now for _, now in self._apart.values()])
        self.account([_host(one) for one in settled], [_host(one) for one in reserved], [host for host, _ in unloading])
        self.device.account(
            [_device(one) for one in settled], [_device(one) for one in reserved], [device for _, device in unloading]
        )


def _host(one: Footprint) -> _Bytes:
    return one.resident_bytes, one.peak_bytes


def _device(one: Footprint) -> _Bytes:
    return one.device_resident_bytes, one.device_peak_bytes


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
