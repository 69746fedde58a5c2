"""load_memory: the memory of loads: predicted before, measured after, corrected when there was too little.

reserve ─> load ─> loaded (its measured bytes are kept for all workers), or failed (predicted higher if it found none)
"""

from __future__ import annotations

import logging
from dataclasses import replace

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.placement.prediction import bounded, larger
from millstream.services.placement.views import Footprint
from millstream.services.process.allocator import return_freed
from millstream.services.repository.base import Repository
from millstream.services.repository.footprints import Measured, file_bytes
from millstream.workers.backends.base import OutOfMemory
from millstream.workers.footprint_meter import Measurement
from millstream.workers.load_version import LoadEnvironment
from millstream.workers.memory_budget import MEMORY_OPTION, MemoryBudget

log = logging.getLogger("millstream.memory")


class LoadMemory:
    """The memory of the loads of one worker. Safe for several threads."""

    def __init__(self, repository: Repository, at: LoadEnvironment) -> None:
        self._footprints = repository.footprints
        self._kind = at.kind
        self.budget = at.budget or MemoryBudget(0)

    def need(self, manifest: Manifest) -> Footprint:
        """Return what an instance of the version takes, as far as it is known."""
        known = self._footprints.of(manifest, self._kind)
        if self._footprints.measured(manifest, self._kind) is not None:  # also that a load found too little
            return known
        return bounded(known, file_bytes(manifest), self.budget.room_bytes)

    def reserve(self, manifest: Manifest) -> None:
        """Reserve the memory that a load will take.

        Raises Failure: MODEL if the version never fits, UNAVAILABLE if it does not fit now.
        """
        need, room = self.need(manifest), self.budget.room_bytes
        if self.budget.reserve(manifest.content_id, need):
            return
        takes = f"it takes {need.load_bytes} bytes of memory, and"
        if need.load_bytes > room:
            raise Failure(Code.MODEL, f"{takes} this worker has {room} for models: raise {MEMORY_OPTION}")
        raise Failure(
            Code.UNAVAILABLE,
            f"{takes} {self.budget.free_bytes} of the {room} for models are free: unload others, or raise "
            f"{MEMORY_OPTION}",
        )

    def loaded(self, manifest: Manifest, measurement: Measurement, seconds: float) -> Footprint:
        """Count what an instance took instead of what was reserved, and keep it for further loads; return it."""
        resident_bytes, peak_bytes, disturbed, alone, whole = measurement
        footprint = Footprint(resident_bytes, peak_bytes, seconds, measured=True)
        if alone and whole:
            self._keep(
                manifest,
                Measured(resident_bytes=resident_bytes, peak_bytes=peak_bytes, load_s=seconds, disturbed=disturbed),
            )
        else:  # the bytes may be those of other loads, or too few
            known = self.need(manifest)
            footprint = replace(known, resident_bytes=max(resident_bytes, known.resident_bytes), load_s=seconds)
            if known.measured and alone:  # keep how long it took: no better bytes are known
                bytes_ = {"resident_bytes": known.resident_bytes, "peak_bytes": known.peak_bytes}
                self._keep(manifest, Measured(**bytes_, load_s=seconds, disturbed=True))
        self.budget.settle(manifest.content_id, footprint)
        return footprint

    def failed(self, manifest: Manifest, error: Exception | None = None) -> None:
        """Return the memory of a load that failed. If it found too little, let the next one reserve more."""
        content_id = manifest.content_id
        if self.budget.footprint(content_id) is None:
            return
        known = self.need(manifest)
        self.budget.begin_unload(content_id)
        return_freed()
        self.budget.freed(content_id)
        if isinstance(error, OutOfMemory):
            # The limit is that of the process: the load has taken all that others had left, not only its own part.
            need = larger(known, self.budget.free_bytes if self.budget.budget_bytes else 0)
            self._keep(
                manifest, Measured(resident_bytes=need.resident_bytes, peak_bytes=need.peak_bytes, measured=False)
            )

    def _keep(self, manifest: Manifest, measured: Measured) -> None:
        try:
            self._footprints.write(manifest, self._kind, measured)
        except Failure as failure:
            log.warning("the memory of %s cannot be recorded: %s", manifest.content_id, failure.message)
