"""Proves readiness: sends a small inference of each idle model through the real queue to a worker and back.

A model is ready if a reply of any kind came recently, or a worker has just loaded it and warmed it up. Traffic proves
that as well, so only idle models are probed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from operator import itemgetter

from millstream.gateway.connection.drain import Drain
from millstream.gateway.scheduling.lane import Lane
from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.inputs import ABSENT, InputTensor
from millstream.gateway.tensors.outputs import Outputs, Reply
from millstream.services.errors import Code, Failure
from millstream.services.metrics import catalogue
from millstream.services.metrics.catalogue import RequestProtocol
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.model.datatypes import BYTES, ITEM_BYTES
from millstream.services.model.signature import Signature, TensorSpec, needed_inputs
from millstream.services.process.waits import next_tick

log = logging.getLogger("millstream.readiness")

EVERY_S = 0.5  # a round of probes
FRESH_S = 3.0  # a model is ready for this long after its last reply: the timeout of a probe, and two rounds
RESTED_S = 0.75  # a model that answered or was probed for less than this time ago is not probed
TIMEOUT_S = 2.0  # timeout of a probe
#: Probes per round; if more models are idle, they take turns. More where the next one may be ready and is not known to
#: be, as after a start.
ROUND_MAX, HASTY_ROUND_MAX = 8, 16
#: Versions with larger inputs are not probed: they count as answering while live workers report them ready.
PROBE_BYTES_MAX = 4 << 20
UNANSWERED = frozenset({Code.EXPIRED, Code.UNAVAILABLE})  # failures of probes that no worker replied to
PAUSE_RUNS = 20  # pause between probes of a model, in runs: probes take at most 1/20 of its time

_FIRST = itemgetter(0)


class Preloads:
    """The models that are loaded at the start of an installation.

    Args:
        fd: the read end of the supervisor's PreloadPipe, not blocking; None: no supervisor loads models.
    """

    def __init__(self, fd: int | None = None) -> None:
        self._fd = fd

    def loading(self) -> bool:
        """Whether models of the start are still being loaded. Never true again once it was false."""
        if self._fd is None:
            return False
        try:
            os.read(self._fd, 1)
        except BlockingIOError:
            return True
        os.close(self._fd)  # the end of the pipe
        self._fd = None
        return False


class ReadinessProbe:
    """The readiness probe of one gateway.

    Args:
        lanes: returns the lanes of the serving versions, another list when they are others.
        connected: returns whether Redis takes batches.
        workers: returns the number of live workers.
    """

    def __init__(
        self,
        lanes: Callable[[], list[Lane]],
        connected: Callable[[], bool],
        workers: Callable[[], int],
        drain: Drain,
        preloads: Preloads,
        registry: MetricsRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lanes = lanes
        self._clock = clock
        self._connected = connected
        self._workers = workers
        self._taking_turns = 0  # lanes that were probed, or need not be, in the last round
        self._indexed: list[Lane] | None = None
        self._index: dict[str, list[Lane]] = {}
        #: lanes whose probes are small enough to be sent regularly -> when each was last due
        self._small: dict[Lane, float] = {}
        self._task: asyncio.Task[None] | None = None
        self._drain = drain
        self.preloads = preloads
        self._registry = registry
        self._shown = registry.gauge(catalogue.GATEWAY_READY, registry.process)
        self._empty_at = float("-inf")  # instant at which there was last no model

    def ready(self) -> bool:
        """Whether the models of the start are loaded, and requests are being answered."""
        return self._serves() and not self.preloads.loading()

    def _serves(self) -> bool:
        """Whether requests are being answered. A gateway with workers and no loaded model can answer a first request.

        When the first model is added, this stays true until a first reply can have arrived.
        """
        if self._drain.draining or not self._connected() or not self._workers():
            return False
        if self._empty_at > self._clock() - FRESH_S:
            return True
        lanes, probed = self._lanes(), False
        self._index_lanes(lanes)
        for lane in lanes:  # among many the first is usually fresh
            state = lane.state
            if state.failed is None and not lane.circuit.open_until and not state.standby:  # a probe loads nothing
                if self._fresh(lane):
                    return True
                probed = True
        return not probed

    def note_empty(self) -> None:
        """Note that there is no model now. Called with each snapshot: the next model may come before the next round."""
        if not self._lanes() and self._serves():
            self._empty_at = self._clock()

    def answering(self, content_id: str) -> bool:
        """Whether a serving version answers. Others, and versions without a reply yet, are as ready as the gateway."""
        if not self._serves():  # a model can be called before the others of the start are loaded
            return False
        lanes = self._lanes()
        self._index_lanes(lanes)
        mine = self._index.get(content_id, [])
        closed = [lane for lane in mine if not lane.circuit.open_until]
        if mine and not closed:
            return False
        answering = [lane for lane in closed if lane.state.standby or self._fresh(lane)]
        return bool(answering) or not any(lane.state.replied_at for lane in closed)

    def _index_lanes(self, lanes: list[Lane]) -> None:
        """Index the lanes, once for each list of lanes, which is never changed."""
        if lanes is self._indexed:
            return
        self._indexed, self._index = lanes, {}
        for lane in lanes:
            self._index.setdefault(lane.content_id, []).append(lane)
        known = self._small
        self._small = {
            lane: known.get(lane, 0.0)
            for lane in lanes
            if lane in known or probe_bytes(lane.manifest.signature) <= PROBE_BYTES_MAX
        }

    def _fresh(self, lane: Lane) -> bool:
        if lane not in self._small:
            return lane.ready
        turns = 1 + max(0, self._taking_turns - 1) // ROUND_MAX
        longest_s = FRESH_S + max(EVERY_S * (turns - 1), PAUSE_RUNS * lane.policy.run_s(1) - EVERY_S)
        return max(lane.state.replied_at, lane.state.loaded_at) > self._clock() - longest_s

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            due: list[Lane] = []
            lanes = self._lanes()
            try:
                due = self._due(lanes)
                self._shown.set(self.ready())
            except Exception:
                log.exception("the readiness of models could not be checked")
            pause_s = EVERY_S / len(due) if len(due) > 1 else 0.0
            # One after the other: a call does not wait for all probes of a round.
            for lane in due or (None,):
                if lane is not None and lane.ready and not lane.circuit.open_until:
                    self._send(lane)
                await (asyncio.sleep(pause_s) if pause_s else next_tick(EVERY_S))
                if self._lanes() is not lanes:
                    break

    def _due(self, lanes: list[Lane]) -> list[Lane]:
        """Return the lanes to probe in the next round, those first that got no reply for the longest time.

        One that was due goes behind the others, also if no reply came: lanes that never answer delay no others.
        """
        now = self._clock()
        self.note_empty()
        self._index_lanes(lanes)
        probed = [
            (max(lane.state.replied_at, due_at), lane)
            for lane, due_at in self._small.items()
            if lane.ready and not lane.circuit.open_until
        ]
        self._taking_turns = len(probed)
        probed.sort(key=_FIRST)
        due: list[Lane] = []
        for at, lane in probed:
            # One and a half rounds: what was probed or answered in the last one rests for this one.
            if len(due) == HASTY_ROUND_MAX or at > now - RESTED_S:
                break
            if len(due) >= ROUND_MAX and self._fresh(lane):
                break
            if lane.state.replied_at <= now - PAUSE_RUNS * lane.policy.run_s(1):
                due.append(lane)
        self._small.update(dict.fromkeys(due, now))
        return due

    def _send(self, lane: Lane) -> None:
        now = self._clock()
        request = Request(
            zero_inputs(lane.manifest.signature), 1, 0, now, now + TIMEOUT_S, _Probe(lane, self._registry)
        )
        try:
            lane.probe(request)
        except Failure:
            pass  # the gateway is full: replies of requests prove readiness
        except Exception:
            log.exception("a readiness probe could not be sent")


class _Probe:
    """The caller of a probe. Counts probes that no worker answered: a failure of the model is an answer, too."""

    protocol = RequestProtocol.V2  # not used: probes are not counted as requests

    def __init__(self, lane: Lane, registry: MetricsRegistry) -> None:
        self._lane = lane
        self._registry = registry

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None: ...

    def answer_one(self, request: Request, reply: Reply) -> None: ...

    def fail(self, request: Request, failure: Failure) -> None:
        if failure.code in UNANSWERED:
            manifest = self._lane.manifest
            labels = (manifest.model, str(manifest.version), self._lane.pool)
            self._registry.counter(catalogue.PROBES_UNANSWERED, *labels).add()


def probe_bytes(signature: Signature) -> int:
    """Return the bytes of the largest tensor of `zero_inputs`."""
    return max((_row_of(spec)[1] for spec in needed_inputs(signature)), default=0)


def _row_of(spec: TensorSpec) -> tuple[tuple[int, ...], int]:
    """Return the shape and bytes of one row."""
    shape = tuple(1 if dim < 0 else dim for dim in spec.shape)
    return shape, math.prod(shape) * (4 if spec.datatype == BYTES else ITEM_BYTES[spec.datatype])


def zero_inputs(signature: Signature) -> list[InputTensor]:
    """Return a row of zeros (empty strings) for each input that is not optional; variable dimensions are 1."""
    inputs: list[InputTensor] = []
    needed = needed_inputs(signature)
    for spec in signature.inputs:
        if spec not in needed:
            inputs.append(ABSENT)
            continue
        shape, size = _row_of(spec)
        inputs.append(InputTensor(shape, bytes(size), size))
    return inputs
