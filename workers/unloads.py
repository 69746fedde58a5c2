"""unloads: removed version: draining -> its stream is empty -> remove its lane -> no lease is left -> close."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from millstream.services.process.allocator import return_freed
from millstream.services.wire.records import State
from millstream.workers.consumer import Consumer
from millstream.workers.loaded_models import LoadedModel, LoadedModels
from millstream.workers.memory_budget import MemoryBudget
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.version_loads import about_version

log = logging.getLogger("millstream.reconciler")

DRAIN_S_MAX = 30.0
PROPAGATION_S = 0.3  # for gateways to learn that a version was removed, and to send its waiting requests


class Unloads:
    """Unloads versions.

    Args:
        connect: opens a consumer for one unload.
        stopping: set when the process is to end: then it waits for nothing.
    """

    def __init__(
        self,
        connect: Callable[[], Consumer],
        models: LoadedModels,
        metrics: WorkerMetrics,
        stopping: threading.Event,
        budget: MemoryBudget,
    ) -> None:
        self._connect = connect
        self._models = models
        self._metrics = metrics
        self._stopping = stopping
        self._budget = budget

    def remove(self, model: LoadedModel) -> None:
        """Unload a version that the repository no longer has. Raises Failure(UNAVAILABLE) without Redis."""
        content_id = model.manifest.content_id
        if model.state is State.READY:
            consumer = self._connect()
            try:
                self._drain(consumer, content_id)
            finally:
                consumer.close()
        loads = model.state in {
            State.LOADING,
            State.WARMING,
        }  # a load closes its instance and returns its memory itself
        if not loads:
            self._budget.begin_unload(content_id)
        self._models.remove(content_id)
        self._metrics.unloaded(model)
        if not loads:
            if model.instance is not None:
                model.instance.close()
                return_freed()
            self._budget.freed(content_id)
        about = about_version(model.manifest)
        log.info("unloaded: %s version %s", model.manifest.model, model.manifest.version, extra=about)

    def _drain(self, consumer: Consumer, content_id: str) -> None:
        """Wait until the lane's batches are run, then remove the lane. Gateways stop sending when the state changes."""
        self._models.move(content_id, State.DRAINING)
        until = time.monotonic() + DRAIN_S_MAX
        while consumer.pending(content_id) and time.monotonic() < until and not self._stopping.wait(0.02):
            continue
        consumer.remove_lane(content_id)
        while consumer.leased(content_id) and time.monotonic() < until and not self._stopping.wait(0.02):
            continue
        consumer.remove_lane(content_id)  # again: the stream is empty now, and the last worker deletes it
