"""Holds each version's lane and codec, and resolves paths to them. Follows the catalog's snapshots.

Resolving a path is one dict lookup. Activating a version replaces the dict, so that no request sees a partial change.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from millstream.gateway.catalog.snapshot import ModelView, Replica, Snapshot, VersionView, name_excerpt, version_number
from millstream.gateway.observing.finished import BatchTiming
from millstream.gateway.placement.demands import ColdLane, ColdRequest, Demands
from millstream.gateway.scheduling.batching.queue_policy import QueueRules
from millstream.gateway.scheduling.composed import ComposedLane, ComposedParts
from millstream.gateway.scheduling.lane import Lane
from millstream.gateway.scheduling.lane_metrics import LaneMetrics
from millstream.gateway.scheduling.lane_state import PoolContext, SharedParts
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.scheduling.packer import Packer
from millstream.gateway.scheduling.producer import Producer
from millstream.gateway.scheduling.request import Responder
from millstream.gateway.scheduling.streams import StreamLane
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.json_text import JsonLimits
from millstream.gateway.tensors.named_columns import NamedColumns
from millstream.gateway.tensors.output_options import Extensions
from millstream.services.errors import Failure, Subject, not_found
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.manifest import Manifest
from millstream.services.model.profile import Profile
from millstream.services.process.waits import busy_poll_s_max
from millstream.services.repository.verdicts import why_unmerged
from millstream.services.settings import Settings
from millstream.services.wire.batch import BATCH_FORMATS, agreed_format
from millstream.services.wire.records import State

log = logging.getLogger("millstream.router")

_UNREAD = (
    "its workers read none of the batch formats of this gateway: another release runs them; restart them with this one"
)
_FAILED = "it failed to load"
_HOLDING = frozenset({State.READY, State.DRAINING})  # states in which a worker answers the batches that it has
REST_LEASES = 30  # cool-down of shared memory that a frozen worker may still write to, in leases
#: size from which a tensor travels in shared memory: a smaller one is copied faster than a segment is taken
SHM_TENSOR_BYTES_MIN = 32 << 10
#: of a request to a model that batches; more than a run takes run in parts
REQUEST_ROWS_MAX = 1_000_000
TURN_MODELS = 16  # models whose lanes are opened in one turn of the event loop

Path = tuple[str, str | None]


class Codec(NamedTuple):
    """How requests of one version are read and replies to them written.

    `decoder`, `responder`: those of the fast path's protocol, which alone knows what its decoder takes and returns.
    `failure`: why the version cannot be served, for example unreadable label files; "": it can be served.
    """

    extensions: Extensions
    decoder: Any
    responder: Responder
    failure: str = ""


class Router:
    """Opens and closes lanes as versions come and go, and finds the route of a path. It is the owner of the lanes.

    Args:
        host: token of the host whose workers share memory with this gateway.
        codec_of: makes the codec of a version. It blocks if the version has label files.
    """

    def __init__(
        self,
        settings: Settings,
        producer: Producer,
        demands: Demands,
        shared: SharedParts,
        registry: MetricsRegistry,
        host: str,
        codec_of: Callable[[Manifest, InputPlans], Codec],
    ) -> None:
        self.routes: Mapping[Path, ModelRoute] = {}
        self._settings = settings
        self._lanes = producer.lanes
        self._demands = demands
        self._producer = producer
        self._shared = shared
        self._registry = registry
        self._host = host
        self._codec_of = codec_of
        self._contexts: dict[str, PoolContext] = {}  # by pool
        self._routes_of: dict[str, dict[Path, ModelRoute]] = {}  # by model
        self._unrouted: set[str] = set()  # models with a version that could not be routed
        self.serving: list[Lane] = []  # all lanes of the versions that answer requests without a version
        self._unservable: dict[str, str] = {}  # content id -> why its codec cannot serve it
        self._snapshot = Snapshot({}, ())
        self._staffed: frozenset[str] = frozenset()  # pools with live workers
        self._behind: frozenset[str] = frozenset()  # pools with a worker that does not read the newest batch format

    async def apply(self, snapshot: Snapshot, changed: Collection[str]) -> None:
        """Open, update and close lanes of the `changed` models, so that they match the snapshot."""
        self._note_pools(snapshot)
        names = self._unrouted | set(changed)
        if not names:
            return
        routes, routes_of, by_content_id = dict(self.routes), dict(self._routes_of), dict(self._lanes.routes)
        unrouted: set[str] = set()
        removed: list[ModelRoute] = []
        for count, name in enumerate(names):
            if count % TURN_MODELS == 0:  # thousands of models at a first start must not delay requests
                await asyncio.sleep(0)
            before = routes_of.pop(name, {})
            now, complete = await self._routes(snapshot.models[name]) if name in snapshot.models else ({}, True)
            if not complete:
                unrouted.add(name)
            if now:
                routes_of[name] = now
            for path in before:
                del routes[path]
            routes |= now
            kept = {route.lane.content_id: route for route in now.values()}
            removed += [by_content_id.pop(content_id) for content_id in _content_ids(before) - kept.keys()]
            by_content_id |= kept
        self._snapshot, self.routes, self._routes_of, self._lanes.routes = snapshot, routes, routes_of, by_content_id
        self._unrouted = unrouted
        serving = [lane for (_, version), route in routes.items() if version is None for lane in route.lanes]
        if serving != self.serving:  # readers keep what they know of the same list
            self.serving = serving
        for route in removed:
            self._close_route(route)

    def _note_pools(self, snapshot: Snapshot) -> None:
        """Note which pools have workers. If that changed, requests of cold versions may go to other pools."""
        staffed = frozenset(worker.pool for worker in snapshot.workers)
        newest = BATCH_FORMATS[-1]
        self._behind = frozenset(one.pool for one in snapshot.workers if newest not in one.batch_formats)
        if staffed != self._staffed:
            self._staffed = staffed
            for route in self._lanes.routes.values():
                if not route.lane.can_serve:
                    route.choose()

    def _close_route(self, route: ModelRoute) -> None:
        self._unservable.pop(route.lane.content_id, None)
        for lane in route.lanes:
            self._close(lane)
        if not route.lanes:
            route.lane.close()

    def _close(self, lane: Lane, *, version_removed: bool = True) -> None:
        log.debug("lane closed: %s, pool %s", lane.content_id, lane.pool)
        lane.close(version_removed=version_removed)
        self._lanes.close(lane)

    async def _routes(self, model: ModelView) -> tuple[dict[Path, ModelRoute], bool]:
        """Return the routes of a model's loaded versions, and whether these are all; `apply` retries the others."""
        routes: dict[Path, ModelRoute] = {}
        complete = True
        for number, view in model.versions.items():
            if not view.loaded:
                continue
            try:
                route = self._lanes.routes.get(view.manifest.content_id) or await self._new_route(view)
                if view.manifest.parts:
                    await self._compose(route, view)
                else:
                    complete &= await self._update_lanes(route, view)
                routes[model.name, str(number)] = route
            except (Failure, OSError) as error:
                log.warning("version %s of %s is not reachable: %s", number, model.name, error)
                complete = False
        if model.serving is not None and (model.name, str(model.serving)) in routes:
            routes[model.name, None] = routes[model.name, str(model.serving)]
        return routes, complete

    async def _new_route(self, view: VersionView) -> ModelRoute:
        manifest = view.manifest
        rows_max = self._rows_max(manifest)
        limits = JsonLimits(self._settings.json_bytes_max, self._settings.json_values_max)
        plans = InputPlans(manifest.model, manifest.answered, rows_max, limits, manifest.trial)
        plans.prepared = self._shared.prepared_of(manifest, plans)
        plans.columns = NamedColumns.of(manifest, plans)
        if plans.columns is not None and plans.columns.closed:
            plans.trial = None  # its texts are no categories: as an example it would be refused
        codec = await self._codec(manifest, plans)
        timeout_s = manifest.config.timeout_ms_default / 1000
        rules = QueueRules(manifest.config) if QueueRules.needed(manifest.config) else None
        return ModelRoute(plans, codec.extensions, codec.decoder, codec.responder, timeout_s, rules)

    def _rows_max(self, manifest: Manifest) -> int:
        """Return the most rows of a request: those of a run only under the max_batch_size of a configuration."""
        if not manifest.signature.batching:
            return 1
        of_a_run = manifest.config.rows_max
        return of_a_run if manifest.triton.get("max_batch_size") else max(of_a_run, REQUEST_ROWS_MAX)

    async def _update_lanes(self, route: ModelRoute, view: VersionView) -> bool:
        """Open and close lanes of a route for the version's pools, and apply what the workers report.

        Returns whether all lanes could be opened. Raises Failure or OSError if there is none.
        """
        lanes = {lane.pool: lane for lane in route.lanes}
        unreachable: Failure | OSError | None = None
        for pool in view.pools:
            if pool in lanes:
                continue
            try:
                lanes[pool] = self._open(view.manifest, await self._context(pool), route)
            except (Failure, OSError) as error:
                unreachable = error
                log.warning("%s: pool %s is not reachable: %s", view.manifest.content_id, pool, error)
        wanted = [lanes[pool] for pool in view.pools if pool in lanes]
        if unreachable is not None and not wanted:
            raise unreachable
        before = route.lanes
        route.set_lanes(wanted)
        for lane in wanted:
            self._update_instances(lane, view)
        route.choose()
        for lane in before:
            if lane not in wanted:
                route.move_from(lane)
                self._close(lane, version_removed=False)
        return unreachable is None

    async def _compose(self, route: ModelRoute, view: VersionView) -> None:
        """Make the lane of a version that runs other versions, once; tell it their state. Raises Failure, OSError."""
        if not hasattr(route, "lane"):
            manifest, shared = view.manifest, self._shared
            observer = shared.recorder.observer
            observer.times_batches = True
            made = ComposedParts(
                manifest,
                lambda: self._lanes.routes,
                shared.admission,
                LaneMetrics(self._registry, manifest, ComposedLane.pool, lazy=True),
                self._registry,
                self._settings.reply_bytes_max,
                lambda: self._settings.server_timing or observer.active,
                self._demands.load,
            )
            runner = await asyncio.to_thread(shared.runner_of, manifest, made)
            route.lane = ComposedLane(made, runner)
        lane = route.lane
        assert isinstance(lane, ComposedLane)
        lane.update(view)

    def _open(self, manifest: Manifest, context: PoolContext, route: ModelRoute) -> Lane:
        log.debug("lane opened: %s, pool %s", manifest.content_id, context.pool)
        # The parts of an answer come inline, and a batch in shared memory could not be answered over a socket.
        segments = None if manifest.streams else self._shared.segments
        packer = Packer(
            manifest.signature,
            segments,
            SHM_TENSOR_BYTES_MIN,
            route.extensions.labelled,
            tells=manifest.is_told,
        )
        # Among many models most are idle: their series are created when they are called.
        lazy = len(self._lanes.routes) >= self._settings.metrics_models_max
        metrics = LaneMetrics(self._registry, manifest, context.pool, lazy=lazy)
        kind = StreamLane if manifest.streams else Lane
        lane = kind(manifest, context, packer, metrics, route.rules, route)
        self._lanes.add(lane)
        return lane

    async def _codec(self, manifest: Manifest, plans: InputPlans) -> Codec:
        """Return the codec of a version. A codec's failure refuses only its version, with the reason."""
        codec_of = self._codec_of
        codec = (
            await asyncio.to_thread(codec_of, manifest, plans) if manifest.config.labels else codec_of(manifest, plans)
        )
        if codec.failure:
            self._unservable[manifest.content_id] = codec.failure
        return codec

    async def _context(self, pool: str) -> PoolContext:
        if pool not in self._contexts:
            direct = self._producer.direct
            self._contexts[pool] = PoolContext(
                pool,
                await self._producer.link(pool),
                self._lanes.pending,
                self._shared.admission,
                self._shared.quarantine,
                self._shared.gate,
                self,
                self._settings.queue_rows_max,
                busy_poll_s_max(),
                REST_LEASES * self._settings.queue_lease_s,
                asyncio.get_running_loop().call_soon,
                asyncio.get_running_loop().call_later,
                # The limit of a single request: a batch costs no more memory than one request may.
                batch_bytes_max=self._settings.request_bytes_max,
                reply_bytes_max=self._settings.reply_bytes_max,
                recorders=self._shared.recorder.batches,
                timing=partial(BatchTiming, shown=self._settings.server_timing),
                observer=None if self._settings.server_timing else self._shared.recorder.observer,
                direct=None if direct is None else direct.send,
                timed=self._lanes.timed,
                used=self._lanes.used,
            )
        return self._contexts[pool]

    def load_for(self, lane: ColdLane, request: ColdRequest) -> None:
        self._demands.check(lane, request)

    def load_again(self, lane: ColdLane) -> None:
        self._demands.wanted(lane)

    def blame(self, pool: str, content_id: str, event: str) -> None:
        self._producer.circuit_breaker.count_soon(pool, content_id, event)

    def has_workers(self, pool: str) -> bool:
        return pool in self._staffed

    def reads_newest(self, pool: str) -> bool:
        return pool in self._staffed and pool not in self._behind

    def _update_instances(self, lane: Lane, view: VersionView) -> None:
        replicas = [replica for replica in view.replicas if replica.worker.pool == lane.pool]
        ready = [replica for replica in replicas if replica.instance.state is State.READY]
        state = lane.state
        state.held = any(replica.instance.state in _HOLDING for replica in replicas)
        batch_format = agreed_format(BATCH_FORMATS, [replica.worker.batch_formats for replica in ready])
        unread = _UNREAD if ready and batch_format is None else None
        ready = [replica for replica in ready if batch_format in replica.worker.batch_formats]
        # Each worker measures by itself: use the profile of the worker that has measured the largest batch.
        measured = max(ready, key=lambda replica: max(replica.instance.profile, default=0)).instance if ready else None
        profile = Profile(measured.profile if measured is not None else {})
        same_host = bool(ready) and all(replica.worker.host == self._host for replica in replicas)
        failed = _failure(view, replicas)
        failed = failed or self._unservable.get(lane.content_id) or unread
        rows = measured.rows_efficient if measured is not None else 1
        state.local_workers = frozenset(one.worker.id for one in ready if one.worker.host == self._host)
        state.standby = view.on_demand and not ready
        state.retry_at = min((at.instance.retry_at for at in replicas if at.instance.retry_at), default=0.0)
        lane.update_instances(
            len(ready),
            profile,
            rows,
            same_host=same_host,
            failed=failed,
            batch_format=batch_format,
            batching_off=bool(why_unmerged(view.manifest, view.verdict)),
        )

    def find(self, model: str, version: str | None) -> ModelRoute:
        """Return the route of a path. The version may have leading zeros.

        Raises Failure, in Triton's words, if there is no route.
        """
        route = self.routes.get((model, version))
        if route is not None:
            return route
        number = None if version is None else version_number(model, version)
        self._snapshot.model(model).version(number)
        route = self.routes.get((model, None if number is None else str(number)))
        if route is None:
            raise not_found(f"Request for unknown model: '{name_excerpt(model)}' is not found", Subject.MODEL)
        return route


def _failure(view: VersionView, replicas: Sequence[Replica]) -> str | None:
    """Return why the workers of one pool, which have these `replicas`, cannot serve a version; None: they can."""
    if view.state is State.FAILED:
        return view.reason or _FAILED
    states = {replica.instance.state for replica in replicas}
    return replicas[0].instance.reason or _FAILED if states == {State.FAILED} else None


def _content_ids(routes: Mapping[Path, ModelRoute]) -> set[str]:
    return {route.lane.content_id for route in routes.values()}
