"""Stops serving a version, closes its instance and returns its memory.

removed from the repository: draining ─> its stream is empty ─> remove its lane ─> no lease is left ─> close
makes room for another one:  release its lane, unless it is in use (one script) ─> close, in a thread of its own
its turn is over:            remove its lane ─> its batches have run ─> close, in a thread of its own
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from enum import StrEnum

from millstream.services.errors import Failure
from millstream.services.metrics.label_limit import Exists
from millstream.services.process.process_memory import return_freed
from millstream.services.wire.records import State
from millstream.workers.batches.consumer import Consumer
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.models.loaded_models import DirectGate, LoadedModel, LoadedModels
from millstream.workers.models.memory_budget import MemoryBudget
from millstream.workers.residency.version_loads import about_version

log = logging.getLogger("millstream.reconciler")

DRAIN_S_MAX = 30.0
STOP_CHECK_S = 0.02  # interval at which it is looked whether the batches of a version have run
PROPAGATION_S = 0.3  # for gateways to learn that a version was removed, and to send its waiting requests


class EvictionReason(StrEnum):
    """Why a version is unloaded that is still to be served: a label of metrics."""

    ROOM = "room"  # another version needs its memory
    BUDGET = "budget"  # what is loaded took more memory than was predicted
    IDLE = "idle"  # it was not called for its `idle_s`
    QUOTA = "quota"  # the models of its key take more than its memory quota, or another of them waits for it
    MOVED = "moved"  # the controller wants fewer instances, or has them elsewhere


class Unloads:
    """Unloads versions. `changed` is notified when an instance was closed; the residency decides under it.

    Args:
        stopping: set when the process is to end: then it waits for nothing.
        run_apart: runs a function beside the caller; closing a large instance takes seconds.
    """

    def __init__(
        self,
        connect: Callable[[], Consumer],
        models: LoadedModels,
        metrics: WorkerMetrics,
        stopping: threading.Event,
        budget: MemoryBudget,
        run_apart: Callable[[Callable[[], None]], None] = lambda function: threading.Thread(
            target=function, name="close", daemon=True
        ).start(),
    ) -> None:
        self._connect = connect
        self._models = models
        self._metrics = metrics
        self._stopping = stopping
        self._budget = budget
        self._run_apart = run_apart
        self.changed = threading.Condition(threading.RLock())
        self._lock = threading.Lock()
        self._closing = Counter[str]()  # content ids

    def end_series(self, exists: Exists, now: float) -> None:
        """End the metrics of versions that were deleted, of which `exists` says that there are none."""
        self._metrics.end_series(exists, now)

    @property
    def closing(self) -> bool:
        """Whether an instance is being closed: its memory is not free yet."""
        return bool(self._closing)

    def any_closing(self, content_ids: Iterable[str]) -> bool:
        """Whether one of these is being closed."""
        return any(content_id in self._closing for content_id in content_ids)

    def remove(self, model: LoadedModel) -> None:
        """Unload a version that the repository no longer has. Raises Failure(UNAVAILABLE) without Redis."""
        content_id, began = model.manifest.content_id, time.monotonic()
        if model.state is State.READY:
            consumer = self._connect()
            try:
                self._drain(consumer, content_id, model.gate)
            finally:
                consumer.close()
        # A load closes its instance and returns its memory itself.
        loads = model.state in {State.LOADING, State.WARMING}
        if not loads:
            self._budget.begin_unload(content_id)
        model = self._models.get(content_id) or model  # its instance may have been swapped meanwhile
        self._models.remove(content_id)
        self._metrics.unloaded(model)
        if not loads:
            if model.instance is not None:
                model.instance.close()
                return_freed()
            self._budget.freed(content_id)
            self._metrics.unload_ended(model.manifest, time.monotonic() - began)
        about = about_version(model.manifest)
        log.info("unloaded: %s version %s", model.manifest.model, model.manifest.version, extra=about)

    def evict(
        self, consumer: Consumer, content_id: str, others_min: int, reason: EvictionReason, why: str, *, stop: bool
    ) -> bool:
        """Unload a version that is still to be served; False: it is not loaded, in use, or too few others serve it.

        Redis decides it: a batch that comes later waits in the lane for another load. The instance is closed later, in
        a thread of its own: its bytes count until then. Raises Failure(UNAVAILABLE).

        Args:
            consumer: the connection of the caller's thread.
            content_id: the version.
            others_min: how many other workers must serve it.
            reason: of the eviction, for metrics.
            why: the same for people.
            stop: also a version that is called: batches that are leased run, those in the lane wait for a load.
        """
        with self._models.changing_lanes:
            model = self._models.get(content_id)
            if model is None or model.state is not State.READY:
                return False
            if stop:
                model.gate.closed = True
            elif not model.gate.close():
                return False
            try:
                if stop:
                    consumer.remove_lane(content_id)
                elif not consumer.release_lane(content_id, others_min):
                    model.gate.closed = False
                    return False
            except Failure:
                model.gate.closed = False
                self._models.signal.add_lanes_again()  # it is not known whether Redis released the lane
                raise
            self._budget.begin_unload(content_id)
            if stop:
                self._models.move(content_id, State.DRAINING)
            else:
                self._models.remove(content_id)
                self._metrics.unloaded(model)
        now, last_call = time.monotonic(), model.calls.last
        self._metrics.evicted(model.manifest, reason.value, now - last_call if last_call else None)
        with self._lock:
            self._closing[content_id] += 1
        close = self._close_when_run if stop else self._close
        self._run_apart(lambda: close(model, why, now))
        return True

    def _close_when_run(self, model: LoadedModel, why: str, began: float) -> None:
        """Close an instance after its last batch, in a thread of its own. The watchdog bounds what that takes."""
        content_id = model.manifest.content_id
        while not self._stopping.is_set():
            try:
                consumer = self._connect()
                try:
                    while (consumer.leased(content_id) or model.gate.inside) and not self._stopping.is_set():
                        self._stopping.wait(STOP_CHECK_S)
                    with self._models.changing_lanes:
                        consumer.remove_lane(content_id)  # again: nothing is leased, and an empty stream is deleted
                finally:
                    consumer.close()
                break
            except Failure as failure:
                log.debug("%s is not closed yet: %s", content_id, failure.message)
                self._stopping.wait(STOP_CHECK_S)
        self._models.remove(content_id)
        self._metrics.unloaded(model)
        self._close(model, why, began)

    def _close(self, model: LoadedModel, why: str, began: float) -> None:
        """Close an instance whose lane is released, and return its memory to the system.

        At the normal priority: a load, for which calls may wait, begins when the memory is free.
        """
        try:
            if model.instance is not None:
                model.instance.close()
                return_freed()
        except Exception:
            log.exception("%s cannot be closed", model.manifest.content_id)
        self._budget.freed(model.manifest.content_id)
        with self._lock:
            self._closing -= Counter([model.manifest.content_id])  # without those of which none is left
        with self.changed:
            self.changed.notify_all()
        self._metrics.unload_ended(model.manifest, time.monotonic() - began)
        about = about_version(model.manifest)
        log.info("unloaded: %s version %s, %s", model.manifest.model, model.manifest.version, why, extra=about)

    def _drain(self, consumer: Consumer, content_id: str, gate: DirectGate) -> None:
        """Wait until the lane's batches are run, then remove the lane. Gateways stop sending when the state changes."""
        self._models.move(content_id, State.DRAINING)
        until = time.monotonic() + DRAIN_S_MAX
        model = self._models.get(content_id)
        if model is not None and model.lost:
            until = 0.0  # it can run nothing: what waits is for other workers, and for its next load
        while consumer.pending(content_id) and time.monotonic() < until and not self._stopping.wait(0.02):
            continue
        with self._models.changing_lanes:
            consumer.remove_lane(content_id)
        while not gate.close() and time.monotonic() < until and not self._stopping.wait(0.02):
            continue
        while consumer.leased(content_id) and time.monotonic() < until and not self._stopping.wait(0.02):
            continue
        consumer.remove_lane(content_id)  # again: the stream is empty now, and the last worker deletes it
