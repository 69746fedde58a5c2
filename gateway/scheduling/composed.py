"""Versions that a gateway runs itself, by having other versions run: graphs.

upload ─> Composer.compose: resolves the parts, says the signature ─> manifest
request ─> ComposedLane: admitted ─> Runner.run ─> requests in the lanes of its parts ……… answer, fail: once

It takes requests where a lane of workers would (RouteLane), so every protocol serves it as any version. What it runs,
and in which order, is the runner's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from millstream.gateway.catalog.snapshot import Snapshot, VersionView
from millstream.gateway.scheduling.admission import CANNOT_SERVE_RETRY_S
from millstream.gateway.scheduling.lane_metrics import LaneMetrics
from millstream.gateway.scheduling.load_report import LaneLoad
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.scheduling.request import Admission, Request, Splitting
from millstream.gateway.tensors.outputs import Reply, no_rows
from millstream.services.errors import Code, Failure
from millstream.services.ingest.report import CheckedModel
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.formats import formats
from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.plugin.registry import load_for
from millstream.services.wire.batch import ReplyHeader
from millstream.services.wire.records import State

log = logging.getLogger("millstream.lane")


class ComposedParts(NamedTuple):
    """What the lane and the runner of a composed version get.

    Args:
        manifest: of the version.
        routes: returns the routes of all versions, by content id.
        admission: counts requests and bytes in flight.
        metrics: of the version.
        registry: for further metrics.
        bytes_max: limit on the tensors that one request holds between its steps.
        records_steps: says whether requests keep those of their steps, for what is recorded and shown of them.
        load: has a version loaded that a step will run, until an instant of the monotonic clock.
    """

    manifest: Manifest
    routes: Callable[[], Mapping[str, ModelRoute]]
    admission: Admission
    metrics: LaneMetrics
    registry: MetricsRegistry
    bytes_max: int
    records_steps: Callable[[], bool]
    load: Callable[[str, float], object]

    def load_cold(self, content_id: str, until: float) -> None:
        """Have the version of a step loaded if no worker has it; that of a graph: those that its steps run."""
        route = self.routes().get(content_id)
        lane = None if route is None else route.lane
        if isinstance(lane, ComposedLane):
            for part in lane.manifest.parts:
                self.load_cold(part.content_id, until)
        elif lane is not None and not lane.can_serve:
            self.load(content_id, until)


class ComposedRun(Splitting, Protocol):
    """A request while its steps run. It ends with one call of `answer`, `fail` or `drop` of its lane."""

    def start(self) -> None:
        """Have the first steps run. Raises Failure: the request is refused, and none of them runs."""


class Runner(Protocol):
    """Runs the requests of one composed version."""

    def run(self, request: Request, lane: ComposedLane) -> ComposedRun:
        """Return the run of an admitted request, not started."""

    def run_s(self, rows: int) -> float:
        """Return the measured seconds of the longest chain of steps; 0 while nothing was measured."""


class Composer(Protocol):
    """What a format adds whose versions are composed (`Format.composer`)."""

    def compose(
        self,
        source: Path | Mapping[str, Any],
        checked: CheckedModel,
        config: ModelConfig,
        model: str,
        snapshot: Snapshot,
    ) -> CheckedModel:
        """Return a checked upload with its parts and its signature. Raises Failure(INVALID).

        `source`: its file, or Triton's configuration of it in JSON form. `model`: to which it is uploaded.
        """

    def gather(
        self, folder: Path, checked: CheckedModel, snapshot: Snapshot, folder_of: Callable[[str, int], Path]
    ) -> bool:
        """Put beside an upload, in its `folder`, what the check makes one model of; False: it stays composed. Blocking.

        Raises Failure.
        """

    def check(self, config: Mapping[str, Any]) -> None:
        """Raise Failure(INVALID) for a configuration of Triton, in JSON form, that is wrong whatever it composes."""

    def runner(self, path: Path, made: ComposedParts) -> Runner:
        """Return what runs a version with the file at `path`. Blocking. Raises Failure, OSError."""


def composer_of(source_format: str) -> Composer | None:
    """Return what composes the versions of a format; None: workers load them."""
    found = formats().get(source_format)
    return None if found is None or not found.composer else cast("Composer", load_for(found, found.composer))


def runner_of(folder_of: Callable[[str, int], Path], manifest: Manifest, made: ComposedParts) -> Runner:
    """Return the runner of a composed version, for the router. Blocking. Raises Failure, OSError."""
    composer = composer_of(manifest.source_format)
    if composer is None:
        raise Failure(Code.UNAVAILABLE, f"no plug-in runs {manifest.source_format}")
    return composer.runner(folder_of(manifest.model, manifest.version) / manifest.served, made)


class ComposedLane:
    """Takes the requests of one composed version. Call it only in the event loop.

    A request has one permit, which also counts the tensors that its run holds, one deadline and one answer.
    """

    pool = "gateway"

    def __init__(self, made: ComposedParts, runner: Runner, clock: Callable[[], float] = time.monotonic) -> None:
        self.manifest, self.content_id = made.manifest, made.manifest.content_id
        self._admission, self._metrics, self._clock = made.admission, made.metrics, clock
        self.policy = runner
        self._failed: str | None = None  # why it cannot serve
        self._running = 0

    @property
    def can_serve(self) -> bool:
        """Whether it answers requests now."""
        return self._failed is None

    @property
    def waiting(self) -> int:
        """How many requests wait: each does in the lane of a part."""
        return 0

    @property
    def idle(self) -> bool:
        """Whether no request runs."""
        return not self._running

    @property
    def load(self) -> LaneLoad:
        """What load balancers are told."""
        return LaneLoad(0.0, 0, self._running, int(self.can_serve))

    def update(self, view: VersionView) -> None:
        """Follow the states of its parts."""
        self._failed = view.reason if view.state is State.FAILED else None
        self._metrics.instances.set(int(view.available))

    def add(self, request: Request, size_bytes: int, *, single: bool = False) -> None:
        """Admit a request and start its run. Raises Failure, also that of a first step."""
        request.lane = self
        if self._failed is not None:
            name = self.manifest.model
            message = f"model '{name}' cannot serve: {self._failed}"
            raise Failure(Code.UNAVAILABLE, message, retry_after_s=CANNOT_SERVE_RETRY_S)
        if not request.rows:
            request.done = True
            self._metrics.answered_without_run(request.responder.protocol, self._clock() - request.arrival)
            request.responder.answer_one(request, no_rows(self.manifest.answered))
            return
        self._admission.admit(request, size_bytes)
        self._running += 1
        run = self.policy.run(request, self)
        request.split = run
        try:
            run.start()
        except BaseException:
            if not request.done:
                self._finish(request)
            raise

    def answer(self, request: Request, reply: Reply) -> None:
        """Answer a request. `reply`: an output of no elements stands for one that the request does not want."""
        self._finish(request)
        seconds = self._clock() - request.arrival
        # The whole counts as its run: how long the parts waited is in their own statistics.
        header = ReplyHeader("", "", 0.0, 0.0, seconds, 0.0, request.rows, [request.rows], {}, [], "")
        self._metrics.ran(header)
        self._metrics.answered(request.responder.protocol, [seconds], request.rows, header, seconds)
        try:
            request.responder.answer_one(request, reply)
        except Exception:
            log.exception("an answer could not be delivered")

    def fail(self, request: Request, failure: Failure) -> None:
        """Answer a request with `failure`."""
        self._finish(request)
        self._metrics.failed(request.responder.protocol, failure.code, self._clock() - request.arrival)
        try:
            request.responder.fail(request, failure)
        except Exception:
            log.exception("a failure could not be delivered")

    def drop(self, request: Request) -> None:
        """End a request whose caller went away: it gets no reply."""
        self._finish(request)
        self._metrics.failed(request.responder.protocol, Code.CANCELLED, self._clock() - request.arrival)

    def _finish(self, request: Request) -> None:
        request.done, request.split, request.inputs = True, None, ()
        self._running -= 1
        self._admission.release((request,))

    def cancel(self, request: Request) -> None:
        """Drop a request whose caller went away, and its steps."""
        if not request.done and request.split is not None:
            request.split.cancel()

    def record_rejection(self, protocol: str, code: Code) -> None:
        """Count a request that was refused, or could not be read, before it was admitted."""
        self._metrics.record_rejection(protocol, code)

    def close(self, *, version_removed: bool = True) -> None:
        """Show no more metrics. Requests that run are answered."""
        self._metrics.close(version_removed=version_removed)
