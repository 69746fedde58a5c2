"""The memory quotas of keys, and what the models of these keys take in this worker and in others.

keys of the repository ─> read ─> limits ┐
heartbeat ─> exchange with all workers ──┴─> Quota of a version's owner
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import replace

from millstream.services.access.access_keys import AccessKeys
from millstream.services.access.document import memory_quotas
from millstream.services.errors import Failure
from millstream.services.placement.quota import Held, Quota, counted, read_held, write_held
from millstream.services.placement.views import WorkerView
from millstream.services.wire.records import State
from millstream.services.wire.worker_id import name_of
from millstream.workers.batches.consumer import Consumer
from millstream.workers.models.wanted import Wanted
from millstream.workers.residency.self_view import SelfView

log = logging.getLogger("millstream.residency")

READ_S = 1.0  # between two looks at the keys, of which a quota is changed seldom


class OwnerQuotas:
    """The quotas in one worker. `exchange` and `read` are called in threads of their own.

    Args:
        keys: of the repository; None: quotas are not in force.
    """

    def __init__(self, view: SelfView, keys: AccessKeys | None) -> None:
        self._keys = keys
        self._worker = name_of(
            view.worker
        )  # it stays when the worker is started again, which takes over what this told
        self._view = view
        self._limits: Mapping[str, int] = {}  # key -> bytes
        self._others: Mapping[str, Mapping[str, Held]] = {}  # worker -> key -> what its models take
        self._wanted: dict[str, int] = {}  # key -> bytes that other workers are to free
        self._asked: dict[str, int] = {}  # likewise, since the last `settle_wants`
        self._told = False  # whether Redis may have something of this worker
        self._stamp: object = None
        self._read_at = float("-inf")

    def read(self) -> None:
        """Read the quotas, if some time has passed since and the keys have changed. Without the keys, those before."""
        now = time.monotonic()
        if self._keys is None or now < self._read_at + READ_S:
            return
        self._read_at = now
        try:
            stamp = self._keys.stamp()
            if stamp is not None and stamp == self._stamp:
                return
            limits = memory_quotas(self._keys.read().documents)
        except Failure as failure:
            log.warning("the keys cannot be read, and memory quotas stay as they are: %s", failure.message)
            return
        self._stamp = stamp
        if limits != self._limits:
            self._limits = limits
            self._view.models.signal.soon()
            self._view.learnt = True

    def exchange(self, consumer: Consumer, life_s: float) -> Mapping[str, int]:
        """Tell what the models of keys with a quota take here, for `life_s`, and learn it of the others.

        Returns the bytes by key. Raises Failure(UNAVAILABLE) without Redis.
        """
        if not (self._limits or self._told):
            return {}
        limits, now = self._limits, self._view.now()
        held = self._held(limits)
        told = {key: one for key, one in held.items() if one != Held()}
        stored = consumer.exchange_held(self._worker, write_held(told, now + life_s) if told else b"")
        self._told = bool(told)
        others = {worker: read_held(data, now) for worker, data in stored.items() if worker != self._worker}
        consumer.forget_held([worker for worker, theirs in others.items() if not theirs])
        others = {worker: theirs for worker, theirs in others.items() if theirs}
        if others != self._others:
            self._others = others
            self._view.learnt = True
        return {key: one.taken for key, one in held.items()}

    def all(self) -> list[Quota]:
        """Return all quotas."""
        limits = self._limits
        held = self._held(limits)
        return [self._quota(key, limit_bytes, held[key]) for key, limit_bytes in limits.items()]

    def of(self, one: Wanted) -> Quota | None:
        """Return the quota of the key that owns a version; None: it has none."""
        owner = one.placement.owner
        limit_bytes = self._limits.get(owner) if owner else None
        return None if limit_bytes is None else self._quota(owner, limit_bytes, self._held([owner])[owner])

    def _quota(self, key: str, limit_bytes: int, held: Held) -> Quota:
        others = {worker: theirs[key] for worker, theirs in self._others.items() if key in theirs}
        return Quota(key, limit_bytes, self._worker, held, others)

    def want(self, key: str, size_bytes: int) -> None:
        """Have other workers free so much of a key's quota, as long as this is called between two `settle_wants`."""
        self._asked[key] = max(size_bytes, self._asked.get(key, 0))

    def settle_wants(self) -> None:
        """Tell other workers what is wanted, now that all that waits was looked at."""
        asked, self._asked = self._asked, {}
        if asked != self._wanted:
            self._wanted = asked
            self._view.models.signal.soon()

    def view(self, key: str, worker: WorkerView) -> tuple[WorkerView, Collection[str]]:
        """Return a worker with the instances of a key's models alone, and which of these are on their way out."""
        owned = {content_id: one for content_id, one in worker.instances.items() if self._owner(content_id) == key}
        states = {content_id: model.state for content_id, model in self._view.models.all().items()}
        leaving = [content_id for content_id in owned if states.get(content_id) is State.DRAINING]
        return replace(worker, instances=owned), leaving

    def _owner(self, content_id: str) -> str:
        wanted = self._view.wanted.get(content_id)
        return "" if wanted is None else wanted.placement.owner

    def _held(self, keys: Collection[str]) -> dict[str, Held]:
        """Return what the models of keys take here. What is being closed is no longer theirs."""
        held = {key: Held(wanted=self._wanted.get(key, 0)) for key in keys}
        wanted = self._view.wanted
        for content_id, footprint in self._view.budget.footprints().items() if keys else ():
            one = wanted.get(content_id)
            if one is None or one.placement.owner not in held:
                continue
            size_bytes, before = counted(footprint), held[one.placement.owner]
            stays = one.placement.pin or one.placement.instances_min > 0
            held[one.placement.owner] = before._replace(
                taken=before.taken + size_bytes, stays=before.stays + (size_bytes if stays else 0)
            )
        return held
