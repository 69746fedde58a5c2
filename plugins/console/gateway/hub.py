"""Samples a gateway's counts for all consoles that look at it, and for the history.

viewers ─some──> a sample every few seconds ─> frame, once for each set of scopes ─> each viewer takes the newest
        └─none─> one sample every HISTORY_S
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import orjson

from millstream.gateway.access.principal import Principal
from millstream.gateway.catalog.catalog import Catalog
from millstream.gateway.parts import GatewayParts
from millstream.plugins.console.gateway import rates
from millstream.plugins.console.gateway.call_log import CallShare
from millstream.plugins.console.gateway.problems import problems
from millstream.plugins.console.gateway.rates import Counts, Growth, Reading
from millstream.plugins.console.gateway.traffic_history import HISTORY_S, TrafficHistory
from millstream.services.access.scopes import Grants, Need
from millstream.services.metrics.files import ReadCache
from millstream.services.process.cancellation import cancel_all
from millstream.services.repository.disk import disk_space
from millstream.services.wire.records import State, WorkerRecord

log = logging.getLogger("millstream.console")

SAMPLE_S, SAMPLE_MANY_S = 2.0, 5.0  # between two samples while somebody looks; the latter with more than MANY models
MANY = 200
ASKING_MAX = 2  # threads that wait for a Prometheus, which may be slow
UNREAD_S = 1.0  # for which a viewer's last events may be unread while the gateway drains


class Viewer:
    """One console that looks. `ended`: it gets no more frames. `abort`: ends its connection."""

    def __init__(self, principal: Principal | None, abort: Callable[[], None]) -> None:
        self._principal = principal
        self.abort = abort
        self.changed = asyncio.Event()
        self.ended = False

    @property
    def grants(self) -> Grants | None:
        """What its key may do now; None: it sees all."""
        principal = self._principal
        return None if principal is None or principal.sees_all(Need.READ) else principal.grants

    def end(self) -> None:
        self.ended = True
        self.changed.set()


class Frames:
    """What a gateway did until now, as frames for those who may see all of it or a part."""

    def __init__(self, document: dict[str, Any]) -> None:
        self.document = document
        self._frames: dict[Grants | None, bytes] = {}

    def frame(self, viewer: Viewer) -> bytes:
        """Return the event for a viewer."""
        grants = viewer.grants
        frame = self._frames.get(grants)
        if frame is None:
            document = self.document if grants is None else _seen(self.document, grants)
            frame = self._frames[grants] = b"event: overview\ndata: %b\n\n" % orjson.dumps(document)
        return frame


def _seen(document: dict[str, Any], grants: Grants) -> dict[str, Any]:
    """Return what a key may see that does not read all models: sums of its rows, in place of the totals."""
    rows = [one for one in document["endpoints"] if grants.allows(Need.READ, one["model"])]
    totals = dict.fromkeys(document["totals"])
    for name in ("requests_per_s", "failed_per_s", "invalid_per_s", "queue_rows"):
        known = [one[name] for one in rows if one[name] is not None]
        totals[name] = sum(known) if known or not rows else None
    wrong = [
        one
        for one in document["problems"]
        if not one["private"] and (one["model"] is None or grants.allows(Need.READ, one["model"]))
    ]
    return document | {"totals": totals, "endpoints": rows, "problems": wrong}


class Hub:
    """The console's part of a gateway, which routes find as `deps.part(Hub)`."""

    def __init__(self, parts: GatewayParts) -> None:
        self._registry = parts.registry
        self._counts, self._cache = Counts(), ReadCache(rates.WANTED)
        self._catalog: Catalog = parts.catalog
        self._viewers: set[Viewer] = set()
        self._wake = asyncio.Event()
        self._last: Reading | None = None
        self._before: Reading | None = None  # at the last entry of the history
        self._earlier: Reading | None = None  # at the one before, since when problems are looked for
        self._folder = parts.settings.repository_dir
        self.calls = CallShare(parts)
        self.history = TrafficHistory()
        self.asking = asyncio.Semaphore(ASKING_MAX)
        self._running = False
        self._tasks: list[asyncio.Task[None]] = []
        self.sample: Frames | None = None
        parts.on_drain(self._end)

    async def start(self) -> None:
        self._running = True
        await self.calls.start()
        self._tasks = [asyncio.create_task(self._run(), name="console")]

    async def stop(self) -> None:
        self._end()
        await cancel_all(self._tasks)
        await self.calls.stop()

    @property
    def viewed(self) -> bool:
        """Whether anybody looks."""
        return bool(self._viewers)

    @contextmanager
    def viewing(self, principal: Principal | None, abort: Callable[[], None]) -> Iterator[Viewer]:
        """Count a console that looks as long as the block lasts.

        `principal`: who looks; None: anybody may see all. `abort`: ends its connection.
        """
        viewer = Viewer(principal, abort)
        if not self._running:
            viewer.end()
        self._viewers.add(viewer)
        self._wake.set()
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)

    def _end(self) -> None:
        """Let all viewers go to another gateway. One that does not read would hold up the drain."""
        self._running = False
        for viewer in self._viewers:
            viewer.end()
            asyncio.get_running_loop().call_later(UNREAD_S, viewer.abort)
        self._wake.set()

    async def _run(self) -> None:
        due = time.monotonic()  # of the next entry of the history
        while self._running:
            now = time.monotonic()
            if self._viewers:
                self.calls.look()
            if now >= due or (self._viewers and now >= self._next_at()):
                try:
                    await self._take(enters=now >= due)
                except Exception:
                    log.exception("the console's sample could not be taken; trying again")
                    await asyncio.sleep(SAMPLE_S)
                if now >= due:
                    due = now + HISTORY_S
            self._wake.clear()
            next_at = min(due, self._next_at()) if self._viewers else due
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, next_at - time.monotonic())):
                    await self._wake.wait()

    def _next_at(self) -> float:
        """Return when those who look get the next sample."""
        every_s = SAMPLE_MANY_S if len(self._catalog.snapshot.models) > MANY else SAMPLE_S
        return 0.0 if self.sample is None or self._last is None else self._last.at_s + every_s

    async def _take(self, *, enters: bool) -> None:
        """Take a sample. `enters`: whether the history gets it, too."""
        snapshot = self._catalog.snapshot
        reading = await asyncio.to_thread(self._read, snapshot.models)
        at = time.time()  # noqa: TID251 - an instant for people
        if enters:
            self.history.enter(Growth(self._before, reading), snapshot.workers)
            self._earlier, self._before = self._before, reading
        growth, self._last = Growth(self._last, reading), reading
        if not self._viewers:
            self.sample = None
            return
        disk = await asyncio.to_thread(self._disk)
        workers = [_worker(one, growth) for one in snapshot.workers]
        document = {
            "at": at,
            "totals": rates.totals(growth),
            "endpoints": rates.endpoints(growth),
            "workers": sorted(workers, key=lambda one: (one["pool"], one["worker"])),
            "problems": problems(Growth(self._earlier, reading), snapshot, disk, at),
        }
        self.publish(document)

    def publish(self, document: dict[str, Any]) -> None:
        """Show all viewers a sample. Those that still write the last one get the newest when they are done."""
        self.sample = Frames(document)
        for viewer in self._viewers:
            viewer.changed.set()

    def _disk(self) -> tuple[int, int]:
        with suppress(OSError):
            return disk_space(self._folder)
        return 0, 0

    def _read(self, exists: Collection[str]) -> Reading:
        return self._counts.read(time.monotonic(), self._registry.parts(self._cache), exists)


def _worker(record: WorkerRecord, growth: Growth) -> dict[str, Any]:
    name = rates.worker_name(record.id)
    resident = growth.now.of(rates.RESIDENT).get((f"worker-{name}",))
    return {
        "worker": name,
        "pool": record.pool,
        "device": record.device,
        "busy": growth.busy(record.pool, name),
        "memory_used_bytes": record.used_bytes,
        "memory_budget_bytes": record.budget_bytes or None,
        "resident_bytes": None if resident is None else int(resident[0]),
        "instances": sum(one.state is not State.FAILED for one in record.instances),
        "draining": record.draining,
    }


def build(parts: GatewayParts) -> Hub:
    """Return the console's part of a gateway."""
    return Hub(parts)
