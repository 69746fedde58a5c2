"""What this worker holds and is to hold, as the decisions of placement see it, and the lock under which it decides.

instances, account of the memory, calls ─> WorkerView ─(and Redis: what is in use)─> what may be unloaded
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from millstream.services.model.manifest import Manifest
from millstream.services.placement.views import Footprint, PlacedInstance, WorkerView
from millstream.services.queue.pipeline import RedisClock
from millstream.services.wire.orders import Order
from millstream.services.wire.records import State
from millstream.services.wire.worker_id import pool_of
from millstream.workers.batches.consumer import Consumer
from millstream.workers.models.loaded_models import LoadedModel, LoadedModels
from millstream.workers.models.wanted import Wanted
from millstream.workers.residency.unloads import Unloads
from millstream.workers.residency.version_loads import VersionLoads


class SelfView:
    """The view that a worker has of itself. Its methods are called with `changed` locked.

    Attributes:
        changed: locked while deciding; notified when `wanted` changes, and when an instance was closed.
        wanted: the versions that the repository has for the pool, by content id.
        put_away: content ids that were unloaded, or not loaded, for want of memory or of calls: not preloaded.
        again: orders that this worker gives itself.
        ended: content ids whose demands end without a lane.
        learnt: whether preloads are to be chosen again: a load ended, or quotas changed.
    """

    def __init__(
        self, worker: str, models: LoadedModels, loads: VersionLoads, unloads: Unloads, clock: RedisClock
    ) -> None:
        self.worker = worker
        self.models, self.loads, self.unloads = models, loads, unloads
        self.budget = loads.memory.budget
        self.changed = unloads.changed
        self.wanted: dict[str, Wanted] = {}
        self.put_away: set[str] = set()
        self.again: deque[Order] = deque()
        self.ended: deque[str] = deque()
        self.learnt = False
        self._clock = clock

    def now(self) -> float:
        """Return the seconds of the Redis clock."""
        return self._clock.now_ms() / 1000

    def monotonic(self) -> float:
        """Return the seconds of the monotonic clock, which is never set."""
        return self.now() - self._clock.offset_ms / 1000

    def on_redis_clock(self, instant: float) -> float:
        """Return an instant of the monotonic clock in seconds on the Redis clock; 0, which is none, stays 0."""
        return instant + self._clock.offset_ms / 1000 if instant else 0.0

    def until(self, order: Order) -> float:
        """Return the time (monotonic) after which an order is not worth a load."""
        if order.token or not order.deadline:
            return float("inf")
        return order.deadline - self._clock.offset_ms / 1000

    def need(self, manifest: Manifest) -> Footprint:
        """Return what a version takes here: what was reserved or measured, else what is known or predicted."""
        return self.budget.footprint(manifest.content_id) or self.loads.memory.need(manifest)

    def last_used(self, model: LoadedModel) -> float:
        """Return the instant of the last call, in seconds on the Redis clock; 0: there was none."""
        return self.on_redis_clock(model.calls.last)

    def with_use(self, consumer: Consumer) -> tuple[WorkerView, frozenset[str]]:
        """Return what the worker holds, with what is in use, and which versions are needed for instances_min.

        Raises Failure(UNAVAILABLE) without Redis.
        """
        wanted = self.wanted
        counted = [one.content_id for one in wanted.values() if one.placement.instances_min]
        counted = [content_id for content_id in counted if self.models.get(content_id) is not None]
        holders, in_use = consumer.lanes_in_use(counted, list(self.models.lanes()))
        protected = {
            content_id
            for content_id, count in holders.items()
            if count - 1 < wanted[content_id].placement.instances_min
        }
        in_use |= {content_id for content_id, model in self.models.all().items() if model.gate.inside}
        return self.of(self.loads.active(), in_use), frozenset(protected)

    def of(self, active: Collection[str], in_use: Collection[str] = ()) -> WorkerView:
        """Return what the worker holds. `active`: content ids that are being loaded or are demanded."""
        instances: dict[str, PlacedInstance] = {}
        budget = self.budget
        footprints = budget.footprints()
        for content_id, model in self.models.all().items():
            if is_held(model, content_id in active) and (model.state is not State.DRAINING or content_id in footprints):
                footprint = footprints.get(content_id) or self.loads.memory.need(model.manifest)
                instances[content_id] = self._placed(model, footprint, content_id in in_use)
        return WorkerView(
            self.worker,
            pool_of(self.worker),
            budget.budget_bytes,
            budget.used_bytes,
            instances=instances,
            device_budget_bytes=budget.device.budget_bytes,
            device_used_bytes=budget.device.used_bytes,
            room_bytes=budget.room_bytes,
            device_room_bytes=budget.device.room_bytes,
            leaving_bytes=budget.leaving_bytes,
            device_leaving_bytes=budget.device.leaving_bytes,
        )

    def _placed(self, model: LoadedModel, footprint: Footprint, in_use: bool) -> PlacedInstance:
        content_id = model.manifest.content_id
        known = self.models.usage.fold(content_id, model.calls)
        last_used, ready_at = self.last_used(model), self.on_redis_clock(model.loaded_at)
        if model.demanded:
            last_used = max(last_used, ready_at)  # its first call is on its way
        was_called = last_used > 0
        if model.staged:  # a client asked for it: it makes room for calls, not for what the worker loads by itself
            last_used = max(last_used, ready_at)
        if model.state is not State.READY:  # one that drains goes without an order: it may go as little as a load
            loaded_at = float("inf")
        else:  # a version that was never called is no loss, however young it is
            loaded_at = ready_at if was_called else 0.0
        wanted = self.wanted.get(content_id)
        pinned = wanted is not None and wanted.placement.pin
        staged = wanted is not None and wanted.staged  # its activation waits until it is ready
        return PlacedInstance(content_id, footprint, loaded_at, last_used, in_use, pinned or staged, known.usage)


def is_held(model: LoadedModel | None, active: bool) -> bool:
    """Return whether a version is loaded, or is being loaded or demanded (`active`)."""
    return active or (model is not None and model.state in {State.READY, State.DRAINING})
