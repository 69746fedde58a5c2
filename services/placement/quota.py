"""Memory quotas: what the models of a key may take in all workers together, and what goes for that. Pure.

what each worker tells ─> Quota ─> allows: a load may begin
                               ├─> make_way: what of the key's own models goes for one, here; the rest others free
                               └─> to_free: what this worker frees for another one, or since it is too much

A key over its quota unloads, or waits for, its own models alone. What counts is what a load reserves: an instance with
the peak of its runs, of the host and of the device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec

from millstream.services.placement.line import Wait, turn
from millstream.services.placement.room import OTHERS_BUSY_RETRY_S
from millstream.services.placement.views import Footprint, Refusal, RefusalKind, WorkerView
from millstream.services.sizes import sizes


class Held(NamedTuple):
    """What the models of a key take in one worker, in bytes.

    Args:
        taken: of all its instances, loads in progress included.
        stays: of those that are pinned, or always loaded.
        wanted: beside these, of a version for which other workers are to free the quota.
    """

    taken: int = 0
    stays: int = 0
    wanted: int = 0


_Text = tuple[float, dict[str, tuple[int, int, int]]]
_decoder = msgspec.json.Decoder(_Text)


def write_held(held: Mapping[str, Held], until: float) -> bytes:
    """Return what a worker tells the others. `until`: when that ends, in seconds on the Redis clock."""
    return msgspec.json.encode((until, held))


def read_held(data: bytes, now: float) -> Mapping[str, Held]:
    """Return what a worker told; empty if that has ended, or another release wrote it."""
    try:
        until, held = _decoder.decode(data)
    except msgspec.DecodeError:
        return {}
    return {key: Held(*one) for key, one in held.items()} if until > now else {}


class Quota(NamedTuple):
    """The quota of a key, as one worker sees it.

    Args:
        key: its name.
        limit_bytes: at least 1.
        worker: the name of this worker.
        here: what its models take in this worker.
        others: worker -> what they take there.
    """

    key: str
    limit_bytes: int
    worker: str
    here: Held
    others: Mapping[str, Held]

    @property
    def free_bytes(self) -> int:
        """What its models may take beside what they take now; negative: they take too much."""
        return self.limit_bytes - self.here.taken - sum(one.taken for one in self.others.values())

    def allows(self, need: Footprint) -> bool:
        """Return whether a load may begin now. One that was never measured is tried with the whole quota at most."""
        return self.takes(need) <= self.free_bytes

    def takes(self, need: Footprint) -> int:
        """Return what a load counts: predictions are high, and alone no reason to refuse a version for good."""
        return counted(need) if need.measured else min(counted(need), self.limit_bytes)

    def make_way(
        self,
        worker: WorkerView,
        leaving: Collection[str],
        need: Footprint,
        now: float,
        protected: Collection[str],
        *,
        called: bool,
    ) -> tuple[tuple[str, ...] | Wait | Refusal, int]:
        """Return what of the key's models in this worker goes for one of them, and what other workers are to free for.

        If this worker can make way alone, the others free nothing. Otherwise they free what they can, and this worker
        the rest (`line.turn`).

        Args:
            worker: the instances of the key's models alone.
            leaving: content ids of instances that are on their way out.
            need: what the version takes.
            now: the current instant.
            protected: content ids that must stay.
            called: whether calls wait for it.
        """
        takes = self.takes(need)
        need = replace(need, resident_bytes=takes, peak_bytes=0, device_resident_bytes=0, device_peak_bytes=0)
        elsewhere = sum(one.taken for one in self.others.values())
        found = turn(_counting(worker, leaving, self.limit_bytes - elsewhere), need, now, protected, called=called)
        if not isinstance(found, Refusal):
            return found, 0
        staying = sum(one.stays for one in self.others.values())
        if staying < elsewhere:
            found = turn(_counting(worker, leaving, self.limit_bytes - staying), need, now, protected, called=called)
        if not isinstance(found, Refusal):
            return found, takes
        if found.kind is RefusalKind.BUSY:
            return found, 0
        takes_text, limit, stays = sizes(takes, self.limit_bytes, self.here.stays + staying)
        others = "" if takes > self.limit_bytes else f", of which {stays} are pinned or always loaded"
        return Refusal(
            RefusalKind.NOTHING_EVICTABLE,
            f"it takes {takes_text}, and the models of key '{self.key}' may take {limit} of memory{others}",
            OTHERS_BUSY_RETRY_S,
        ), 0

    def over(self, worker: WorkerView, leaving: Collection[str], now: float, protected: Collection[str]) -> list[str]:
        """Return what of the key's models in this worker goes since they take too much, or others wait for the quota.

        Arguments as of `make_way`.
        """
        too_much = self.to_free()
        if not too_much:
            return []
        waited_for = any(one.wanted for one in self.others.values())
        view = _counting(worker, leaving, self.here.taken)
        found = turn(view, Footprint(too_much), now, protected, called=waited_for)
        return [] if isinstance(found, Refusal | Wait) else list(found)

    def to_free(self) -> int:
        """Return the bytes that this worker is to free: those that the workers before it, by name, cannot."""
        wanted = sum(one.wanted for one in self.others.values())
        before = sum(one.taken - one.stays for worker, one in self.others.items() if worker < self.worker)
        return min(self.here.taken - self.here.stays, max(0, wanted - self.free_bytes - before))


def counted(footprint: Footprint) -> int:
    """Return the bytes of an instance that count for the quota of its key."""
    return footprint.load_bytes + footprint.device_load_bytes


def _counting(worker: WorkerView, leaving: Collection[str], budget_bytes: int) -> WorkerView:
    """Return a worker whose memory is what a key may take there, and in which instances take what counts for it."""
    instances = {
        content_id: replace(one, footprint=Footprint(counted(one.footprint), load_s=one.footprint.load_s))
        for content_id, one in worker.instances.items()
    }
    taken = {content_id: one.footprint.resident_bytes for content_id, one in instances.items()}
    return WorkerView(
        worker.id,
        worker.pool,
        1 + max(0, budget_bytes),  # 0 is no limit: one byte is used in any case
        1 + sum(taken.values()),
        instances=instances,
        leaving_bytes=sum(taken[content_id] for content_id in leaving if content_id in taken),
    )
