"""The memory of loads: predicted before, measured after, corrected when there was too little.

reserve ─> load ─> loaded (its measured bytes are kept for all workers), or failed (predicted higher if it found none)
"""

from __future__ import annotations

import logging
from dataclasses import replace

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.placement.prediction import expected, larger
from millstream.services.placement.views import Footprint
from millstream.services.process.process_memory import return_freed
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.footprints import Measured, file_bytes
from millstream.services.sizes import sizes
from millstream.workers.backends.base import OutOfMemory
from millstream.workers.models.footprint_meter import Measurement
from millstream.workers.models.load_version import LoadEnvironment
from millstream.workers.models.memory_budget import DEVICE_MEMORY_OPTION, MEMORY_OPTION, SPARE_BYTES, MemoryBudget

log = logging.getLogger("millstream.memory")


class NotFree(Failure):
    """The memory of a load is not free now: since it was reserved, other instances turned out to take more."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.UNAVAILABLE, message)


class LoadMemory:
    """The memory of the loads of one worker. Safe for several threads."""

    def __init__(self, repository: FolderRepository, at: LoadEnvironment) -> None:
        self._footprints = repository.footprints
        self._kind = at.kind
        self.budget = at.budget or MemoryBudget(0)

    def need(self, manifest: Manifest) -> Footprint:
        """Return what an instance of the version takes, as far as it is known."""
        known, found = self._footprints.of(manifest, self._kind), self._footprints.measured(manifest, self._kind)
        too_little = None if found is None else found.footprint
        return expected(known, too_little, file_bytes(manifest), self.budget.room_bytes, self.budget.device.room_bytes)

    def need_within(self, manifest: Manifest, room_bytes: int, device_room_bytes: int) -> Footprint:
        """Return what a load of the version is tried with if no more than this memory can be made free."""
        found = self._footprints.measured(manifest, self._kind)
        known = None if found is None else found.footprint
        return expected(self.need(manifest), known, file_bytes(manifest), room_bytes, device_room_bytes)

    def reserve(self, manifest: Manifest) -> None:
        """Reserve the memory that a load will take: what was reserved for it before, if it is tried with less.

        Raises:
            Failure: MODEL, the version never fits.
            NotFree: it does not fit now.
        """
        budget, need = self.budget, self.need(manifest)
        tried = budget.footprint(manifest.content_id)
        if tried is not None and not need.measured and _is_less(tried, need):
            need = tried  # less than predicted (`need_within`)
        if budget.reserve(manifest.content_id, need):
            return
        too_large = budget.too_large(need)
        if too_large:
            raise Failure(Code.MODEL, too_large)
        takes, free, room = sizes(need.load_bytes, budget.free_bytes, budget.room_bytes)
        memory, option = "memory", MEMORY_OPTION
        if need.load_bytes <= budget.free_bytes:
            takes, free, room = sizes(need.device_load_bytes, budget.device.free_bytes, budget.device.room_bytes)
            memory, option = "device memory", DEVICE_MEMORY_OPTION
        raise NotFree(
            f"it takes {takes} of {memory}, and {free} of the {room} for models are free: unload others, or raise "
            f"{option}",
        )

    def loaded(self, manifest: Manifest, measurement: Measurement, seconds: float) -> tuple[Footprint, Measured]:
        """Count what an instance took instead of what was reserved; return it, and what is to be kept (`keep`)."""
        found = Footprint(
            measurement.resident_bytes,
            measurement.peak_bytes,
            seconds,
            True,
            measurement.device_resident_bytes,
            measurement.device_peak_bytes,
        )
        found = self._within_room(found, disturbed=measurement.disturbed)
        kept: Measured
        if measurement.alone and measurement.whole:
            kept = Measured.of(found, disturbed=measurement.disturbed)
        else:  # the bytes may be those of other loads, or too few
            known = self._tried(manifest)
            found = replace(
                known,
                resident_bytes=max(found.resident_bytes, known.resident_bytes),
                device_resident_bytes=max(found.device_resident_bytes, known.device_resident_bytes),
                load_s=seconds,
            )
            # Keep how long it took: no better bytes are known.
            kept = (
                Measured.of(replace(known, load_s=seconds), disturbed=True)
                if known.measured
                else Measured(resident_bytes=0, load_s=seconds, measured=False)
            )
        self.budget.settle(manifest.content_id, found)
        return found, kept

    def _tried(self, manifest: Manifest) -> Footprint:
        """Return what was reserved for a load, or what it takes if nothing was."""
        return self.budget.footprint(manifest.content_id) or self.need(manifest)

    def _within_room(self, found: Footprint, *, disturbed: bool) -> Footprint:
        """Return a measurement without the part of a peak that is more than there is, if others may have added to it.

        A load that succeeded did not take it; and the interpreter's own needs (SPARE_BYTES) may be in each peak.
        """
        over = max(0, found.load_bytes - self.budget.room_bytes)
        device_over = max(0, found.device_load_bytes - self.budget.device.room_bytes)
        if not disturbed:
            over, device_over = over if over <= SPARE_BYTES else 0, 0
        return replace(
            found,
            peak_bytes=max(0, found.peak_bytes - over),
            device_peak_bytes=max(0, found.device_peak_bytes - device_over),
        )

    def failed(self, manifest: Manifest, error: Exception | None = None) -> None:
        """Return the memory of a load that failed. If it found too little, let the next one reserve more."""
        content_id = manifest.content_id
        if self.budget.footprint(content_id) is None:
            return
        known = self._tried(manifest)
        self.budget.begin_unload(content_id)
        return_freed()
        self.budget.freed(content_id)
        if isinstance(error, OutOfMemory):
            # The limit is that of the process: the load has taken all that others had left, not only its own part.
            budget = self.budget
            limit, free = budget.budget_bytes, budget.free_bytes
            if error.of_device:
                limit, free = budget.device.budget_bytes, budget.device.free_bytes
            need = larger(known, free if limit else 0, of_device=error.of_device)
            self.keep(manifest, Measured.of(replace(need, load_s=0.0)))

    def keep(self, manifest: Manifest, measured: Measured) -> None:
        """Keep what was measured for further loads in all workers."""
        try:
            self._footprints.write(manifest, self._kind, measured)
        except Failure as failure:
            log.warning("the memory of %s cannot be recorded: %s", manifest.content_id, failure.message)


def _is_less(one: Footprint, other: Footprint) -> bool:
    """Return whether a load takes less by one footprint than by the other, of the host or of the device."""
    return one.load_bytes < other.load_bytes or one.device_load_bytes < other.device_load_bytes
