"""What a worker does when runs find no memory: it lets go of what it can, and learns which sizes do not fit.

A size is learnt only when its halves ran: then it was the size. A request that finds no memory alone is itself at fault;
the sizes of everybody else stay as they are.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable

from millstream.services.errors import Failure
from millstream.services.process.allocator import trim
from millstream.workers.loaded_models import LoadedModels
from millstream.workers.metrics import WorkerMetrics

log = logging.getLogger("millstream.memory")

#: an instance is built again, and a line is logged, at most so often: whoever asks for too much again and again shall not
#: cost the others a load
REBUILD_S_MIN = 10.0
#: what nobody uses any more is given back at most so often
COLLECT_S_MIN = 1.0


class OutOfMemoryPolicy:
    """For the main loop alone."""

    def __init__(self, held: LoadedModels, tallies: WorkerMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._held = held
        self._tallies = tallies
        self._clock = clock
        self._collected = float("-inf")
        self._said: dict[str, float] = {}
        self._rebuilt: dict[str, float] = {}

    def failed(self, lane: str, rows: int) -> None:
        """A run of `rows` found no memory. If it can be halved the instance begins without what earlier runs left.

        Raises RuntimeError if the instance cannot be built again: then this process has to be.
        """
        holding = self._held.get(lane)
        if holding is None or holding.instance is None:
            return
        self._tallies.out_of_memory(holding)
        now = self._clock()
        if _first(self._said, lane, now):
            log.warning("no memory for a run of %d rows of %s", rows, lane)
        if now - self._collected >= COLLECT_S_MIN:
            self._collected = now
            gc.collect()
            trim()
        if rows < 2 or not _first(self._rebuilt, lane, now):
            return
        try:
            holding.instance.rebuild()
        except Failure as failure:
            raise RuntimeError(f"{lane} cannot be built again: {failure.message}") from failure

    def halves_ran(self, lane: str, rows: int) -> None:
        """What had found no memory with `rows` ran in halves: from now on this instance runs no more than that."""
        holding = self._held.get(lane)
        if holding is not None and holding.rows_efficient > rows // 2:
            log.warning("%s runs at most %d rows from now on", lane, rows // 2)
            self._held.learn(lane, holding.exploration, rows // 2, fitting=rows // 2)


def _first(done: dict[str, float], lane: str, now: float) -> bool:
    """Whether nothing was done for a lane in the last REBUILD_S_MIN; now it is. `done`: when what was done last."""
    if now - done.get(lane, float("-inf")) < REBUILD_S_MIN:
        return False
    for past in [known for known, at in done.items() if now - at >= REBUILD_S_MIN]:
        del done[past]
    done[lane] = now
    return True
