"""Leases -> merge -> run -> split. A failed run is bisected: only the requests at fault get their error.

An instance that answers each request by itself is told where each begins; failures of some leave the others' answers.

A size counts as too large for the memory only if its halves ran. A request that finds no memory alone is itself at
fault, and does not change the sizes of other requests.
"""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature
from millstream.services.process.process_memory import trim
from millstream.services.queue.pipeline import RedisClock
from millstream.services.segments.segment import Segments
from millstream.services.wire.batch import AGAIN, NO_ROOM
from millstream.workers.backends.base import (
    Array,
    InstanceEnded,
    OutOfMemory,
    RunRequest,
    Terminated,
    check_outputs,
    takes_requests,
)
from millstream.workers.batches.lease import Inputs, Lease, RunCost, fail_outside, input_arrays
from millstream.workers.batches.watchdog import Guarded
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.models.loaded_models import LoadedModel, LoadedModels

log = logging.getLogger("millstream.memory")

OnRun = Callable[[Inputs, list[Array]], None]


#: Least time between two rebuilds of an instance, and between two log lines: a caller who repeats a request that is too
#: large must not cause a load each time.
REBUILD_S_MIN = 10.0
#: Least time between two garbage collections.
COLLECT_S_MIN = 1.0


class RequestError(NamedTuple):
    """The error of a failed request."""

    code: Code
    message: str


NO_ERROR = RequestError(Code.INTERNAL, "")


class RunResult(NamedTuple):
    """The result of a run for one lease."""

    lease: Lease
    outputs: list[Array] | None  # of its live requests; None when none is left
    execution_s: float  # of the whole run; 0 when none of its leases had a request left to run
    cost: RunCost


def merge(leases: list[Lease], rows_max: int) -> list[Lease]:
    """Remove from the front of `leases`, and return, those that can run together.

    They are of one lane, have equal shapes, and their rows are within the limit. Isolated leases run alone and after
    the others. Readiness probes run alone: metrics count the cost of a run, but not a probe.
    """
    if len(leases) > 1:
        leases.sort(key=lambda lease: lease.isolated)
    first = leases.pop(0)
    group, rows = [first], first.rows
    if first.isolated or first.header.probe:
        return group
    shapes = [tensor.inner for tensor in first.header.inputs]
    while leases and leases[0].lane == first.lane:
        other = leases[0]
        if other.isolated or other.header.probe or rows + other.rows > rows_max:
            break
        if [tensor.inner for tensor in other.header.inputs] != shapes:
            break
        group.append(leases.pop(0))
        rows += other.rows
    return group


def run(
    group: Sequence[Lease],
    model: LoadedModel,
    segments: Segments,
    clock: RedisClock,
    memory: OutOfMemoryPolicy | None = None,
    guarded: Guarded | None = None,
    on_run: OnRun | None = None,
) -> list[RunResult]:
    """Run leases of one lane together.

    A fault of the model or of a caller becomes the error of the request. Raises Terminated if the run was terminated
    because it exceeded the time that `guarded` allows. `on_run` is called with the inputs and outputs of each run.
    """
    began = time.perf_counter()
    now_ms = clock.now_ms()
    live, arrays = _live(group, now_ms, model, segments)
    rows = sum(lease.rows for lease in live)
    runner = _Runner(model, group[0].lane, memory, guarded, on_run)
    results = runner.run_leases(live, arrays, rows) if live else {}
    execution_s = time.perf_counter() - began if live else 0.0
    input_s = runner.began - began if runner.began else 0.0
    split_s = execution_s - input_s - runner.seconds
    first = RunCost(now_ms, input_s, runner.seconds, split_s, rows, runner.runs, runner.form)
    if len(group) == 1:  # the usual case
        return [RunResult(group[0], results.get(0), execution_s, first)]
    shared = first._replace(runs=[])  # only one reply lists the runs: so they are counted once
    indices = {id(lease): i for i, lease in enumerate(live)}
    return [
        RunResult(lease, results.get(index), execution_s, first if index == 0 else shared)
        for lease in group
        for index in (indices.get(id(lease), -1),)
    ]


def _live(
    group: Sequence[Lease], now_ms: float, model: LoadedModel, segments: Segments
) -> tuple[list[Lease], list[Inputs]]:
    """Return the leases with requests left to run, and their inputs.

    Requests without tensors, or with an index outside of the model's table, fail in their lease.
    """
    live: list[Lease] = []
    arrays: list[Inputs] = []
    signature, ranges = model.manifest.signature, model.manifest.index_ranges
    for lease in group:
        lease.drop_expired(now_ms)
        if lease.header.probe and takes_requests(model.instance):
            for position in list(lease.live_requests):  # any reply proves that the worker answers
                lease.fail(position, Code.MODEL, "a probe is no request, and might have effects")
        if not lease.live_requests:
            continue
        try:
            inputs = input_arrays(lease, signature, segments)
            if ranges and fail_outside(lease, inputs, ranges, batching=signature.batching):
                if not lease.live_requests:
                    continue
                inputs = input_arrays(lease, signature, segments)
            arrays.append(inputs)
        except (Failure, ValueError, MemoryError) as error:  # its gateway or its blob is gone, or there is no memory
            reason = f"the tensors of the request cannot be read: {str(error) or 'no memory'}"
            for position in list(lease.live_requests):
                lease.fail(position, Code.UNAVAILABLE, reason)
        else:
            live.append(lease)
    return live, arrays


class _Runner:
    """Runs rows of one instance, in as many pieces as its memory requires."""

    def __init__(
        self,
        model: LoadedModel,
        lane: str,
        memory: OutOfMemoryPolicy | None,
        guarded: Guarded | None,
        on_run: OnRun | None,
    ) -> None:
        self._model = model
        self._lane = lane
        self._memory = memory
        self._guarded = guarded
        self._on_run = on_run
        self.alone = bool(model.alone)  # requests share no runs
        self.by_request = takes_requests(model.instance)
        self.began = 0.0  # when the first run began
        self.seconds = 0.0  # that all runs took
        self.runs: list[int] = []  # rows of the runs that succeeded
        self.form = ""  # that made the last run

    def run_leases(self, live: Sequence[Lease], arrays: Sequence[Inputs], rows: int) -> dict[int, list[Array] | None]:
        """Return outputs by position in `live`. If there is no memory to merge the leases, each runs by itself."""
        try:
            merged = arrays[0]
            if len(live) > 1:
                merged = {name: np.concatenate([part[name] for part in arrays]) for name in merged}
        except MemoryError:
            self._found_no_memory(rows)
            results = {i: _outputs([lease], self, arrays[i])[0] for i, lease in enumerate(live)}
            if None not in results.values():
                self._halves_ran(rows)
            return results
        return _outputs(live, self, merged)

    def _found_no_memory(self, rows: int) -> None:
        if self._memory is not None:
            self._memory.failed(self._lane, rows)

    def _halves_ran(self, rows: int) -> None:
        if self._memory is not None:
            self._memory.halves_ran(self._lane, rows)

    def run(self, inputs: Inputs) -> list[Array]:
        """Return the outputs for all rows of `inputs`. Raises Failure."""
        try:
            return self._run_once(inputs)
        except OutOfMemory:
            rows = _rows(inputs) if self._model.manifest.signature.batching else 1
            self._found_no_memory(rows)
            if rows < 2 or self._model.alone:  # rows that influence each other must run together
                raise
        halves = [self.run(_part(inputs, part)) for part in (slice(rows // 2), slice(rows // 2, None))]
        self._halves_ran(rows)
        try:
            return [np.concatenate(column) for column in zip(*halves, strict=True)]
        except MemoryError as error:
            raise OutOfMemory(f"no memory for the outputs of {rows} rows") from error

    def answers(self, inputs: Inputs, requests: Sequence[RunRequest]) -> list[list[Array] | RequestError]:
        """Return the answer of each request, whose rows are behind each other in `inputs`. Raises Failure."""
        if not self.by_request:
            outputs = self.run(inputs)
            if len(requests) == 1:
                return [outputs]
            bounds = pairwise(accumulate((one.rows for one in requests), initial=0))
            return [[array[a:b] for array in outputs] for a, b in bounds]
        instance: Any = self._model.instance
        found = self._timed(lambda: instance.run_requests(inputs, requests))
        signature = self._model.manifest.signature
        self.runs.append(sum(one.rows for one in requests) if signature.batching else 1)
        return [_checked(answer, signature, one.rows) for answer, one in zip(found, requests, strict=True)]

    def _timed(self, run: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        model = self._model
        if model.instance is None:
            raise Failure(Code.UNAVAILABLE, f"version {model.manifest.version} of {model.manifest.model} is not loaded")
        began = time.perf_counter()
        self.began = self.began or began
        try:
            try:
                return run()
            except Terminated as terminated:
                if isinstance(terminated, InstanceEnded) or (self._guarded is not None and self._guarded.error):
                    raise
                # The previous run was to be terminated, but had ended before the request.
                return run()
        finally:
            self.seconds += time.perf_counter() - began

    def _run_once(self, inputs: Inputs) -> list[Array]:
        model, signature = self._model, self._model.manifest.signature
        instance: Any = model.instance
        outputs = list(self._timed(lambda: instance.run(inputs)))
        rows = _rows(inputs)
        check_outputs(outputs, signature, rows)
        self.runs.append(rows if signature.batching else 1)
        if model.variant:
            self.form = getattr(model.instance, "form", "")  # of a table of variants
        if self._on_run is not None:
            self._on_run(inputs, outputs)
        return outputs


def _rows(inputs: Inputs) -> int:
    """Return dimension 0 of the inputs; 0 when there are no inputs."""
    for array in inputs.values():
        return int(array.shape[0]) if array.ndim else 0
    return 0


def _part(inputs: Inputs, rows: slice) -> Inputs:
    return {name: array[rows] for name, array in inputs.items()}


def _checked(answer: Sequence[Array] | Failure, signature: Signature, rows: int) -> list[Array] | RequestError:
    try:
        if isinstance(answer, Failure):
            raise answer
        check_outputs(answer, signature, rows)
        return list(answer)
    except Failure as failure:
        return RequestError(failure.code, failure.message)


def _outputs(live: Sequence[Lease], runner: _Runner, inputs: Inputs) -> dict[int, list[Array] | None]:
    """Return outputs by position in `live`; requests at fault fail in their lease."""
    alone = runner.alone and sum(len(lease.live_requests) for lease in live) > 1
    if alone or runner.by_request:
        return _bisect(live, runner, inputs, alone=alone)
    outputs, error = _try_run(runner, inputs)
    if outputs is None:
        return _bisect(live, runner, inputs, known=error)
    if len(live) == 1:
        return {0: outputs}
    bounds = np.cumsum([0, *(lease.rows for lease in live)])
    return {i: [array[bounds[i] : bounds[i + 1]] for array in outputs] for i in range(len(live))}


def _try_run(runner: _Runner, inputs: Inputs) -> tuple[list[Array] | None, RequestError]:
    """Return the outputs, or the error; not the exception, whose traceback would keep all arrays of the run."""
    try:
        return runner.run(inputs), NO_ERROR
    except Terminated:
        raise
    except Failure as failure:
        return None, RequestError(failure.code, failure.message)


def _try_requests(
    runner: _Runner, inputs: Inputs, requests: Sequence[RunRequest]
) -> tuple[list[list[Array] | RequestError] | None, RequestError]:
    """Return the answer of each request, or the error of all, as `_try_run` does."""
    try:
        return runner.answers(inputs, requests), NO_ERROR
    except Terminated:
        raise
    except Failure as failure:
        return None, RequestError(failure.code, failure.message)


def _bisect(
    live: Sequence[Lease], runner: _Runner, inputs: Inputs, *, known: RequestError | None = None, alone: bool = False
) -> dict[int, list[Array] | None]:
    """Halve the failed run until each failure has one request: log2(requests) more runs for one request at fault.

    `known` is the error of the run of all of them; None: nothing ran yet, and with `alone` each is to run alone.
    """
    requests = [(i, position) for i, lease in enumerate(live) for position in lease.live_requests]
    told = [_request(live[i], position) for i, position in requests]
    rows = list(accumulate((one.rows for one in told), initial=0))
    pieces: dict[int, list[list[Array]]] = {i: [] for i in range(len(live))}
    left = [(k, k + 1) for k in reversed(range(len(requests)))] if alone else [(0, len(requests))]
    while left:
        low, high = left.pop()
        error, known = known, None
        if error is None:
            part = inputs if high - low == len(requests) else _part(inputs, slice(rows[low], rows[high]))
            answers, error = _try_requests(runner, part, told[low:high])
            for (i, position), answer in zip(requests[low:high], answers or (), strict=answers is not None):
                _take(live[i], position, pieces[i], answer)
            if answers is not None:
                continue
        if high - low == 1:
            i, position = requests[low]
            live[i].fail(position, error.code, error.message)
        else:
            middle = (low + high) // 2
            left += [(middle, high), (low, middle)]
    return {i: _join(live[i], parts) for i, parts in pieces.items()}


def _request(lease: Lease, position: int) -> RunRequest:
    header = lease.header
    told = json.loads(header.told[position]) if position < len(header.told) else {}
    return RunRequest(header.rows[position], told)


def _take(lease: Lease, position: int, pieces: list[list[Array]], answer: list[Array] | RequestError) -> None:
    """Note the answer of a request. One of other shapes than those before it has no room in the same reply."""
    if isinstance(answer, RequestError):
        lease.fail(position, answer.code, answer.message)
    elif pieces and [one.shape[1:] for one in pieces[0]] != [one.shape[1:] for one in answer]:
        lease.fail(position, AGAIN, NO_ROOM)
    else:
        pieces.append(answer)


def _join(lease: Lease, parts: list[list[Array]]) -> list[Array] | None:
    """Join the outputs of a lease whose requests ran in several parts."""
    try:
        return [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else None
    except MemoryError:
        for position in list(lease.live_requests):
            lease.fail(position, Code.MODEL, "there was no memory for the outputs")
        return None


class OutOfMemoryPolicy:
    """Handles runs that found no memory. Called by the main loop only."""

    def __init__(
        self, models: LoadedModels, metrics: WorkerMetrics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._models = models
        self._metrics = metrics
        self._clock = clock
        self._collected_at = float("-inf")
        self._logged_at: dict[str, float] = {}
        self._rebuilt_at: dict[str, float] = {}

    def failed(self, lane: str, rows: int) -> None:
        """Handle a run of `rows` rows that found no memory.

        If the run can be halved, the instance is rebuilt first, which frees the memory that earlier runs left behind.
        Raises RuntimeError if the rebuild fails: then the process must be replaced.
        """
        model = self._models.get(lane)
        if model is None or model.instance is None:
            return
        self._metrics.out_of_memory(model)
        now = self._clock()
        if _is_due(self._logged_at, lane, now):
            log.warning("no memory for a run of %d rows of %s", rows, lane)
        if now - self._collected_at >= COLLECT_S_MIN:
            self._collected_at = now
            gc.collect()
            trim()
        if rows < 2 or not _is_due(self._rebuilt_at, lane, now):
            return
        try:
            model.instance.rebuild()
        except Failure as failure:
            raise RuntimeError(f"the instance of {lane} cannot be rebuilt: {failure.message}") from failure

    def halves_ran(self, lane: str, rows: int) -> None:
        """Limit the runs of the instance to half of `rows`, which found no memory together but ran in halves."""
        model = self._models.get(lane)
        if model is not None and model.rows_efficient > rows // 2:
            log.warning("%s runs at most %d rows from now on", lane, rows // 2)
            self._models.learn(lane, model.exploration, rows // 2, fitting=rows // 2)


def _is_due(last_at: dict[str, float], lane: str, now: float) -> bool:
    """Return whether the lane's last time is more than REBUILD_S_MIN ago; if so, set it to `now`."""
    if now - last_at.get(lane, float("-inf")) < REBUILD_S_MIN:
        return False
    for past in [known for known, at in last_at.items() if now - at >= REBUILD_S_MIN]:
        del last_at[past]
    last_at[lane] = now
    return True
