"""Runs leases: merge -> run -> split. A run that fails is bisected, so that only the requests at fault get its error."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from millstream.services.errors import Code, Failure
from millstream.services.queue.clock import RedisClock
from millstream.services.segments.segment import Segments
from millstream.workers.backends.base import Array, OutOfMemory, Terminated
from millstream.workers.lease import Inputs, Lease, RunCost, check_outputs, input_arrays
from millstream.workers.loaded_models import LoadedModel
from millstream.workers.watchdog import Guarded

Keep = Callable[[Inputs, list[Array]], None]


class RequestError(NamedTuple):
    """What a request failed with."""

    code: Code
    message: str


NO_ERROR = RequestError(Code.INTERNAL, "")


class RunResult(NamedTuple):
    """What came of one lease. `outputs`: of its live requests, None when none is left.

    `execution_s`: 0 when nothing of the run's leases was left to run.
    """

    lease: Lease
    outputs: list[Array] | None
    execution_s: float
    cost: RunCost


def merge(in_hand: list[Lease], rows_max: int) -> list[Lease]:
    """Take from the front of `in_hand` the leases that can run as one: same lane, equal shapes, rows within the limit.

    A suspect runs alone, and after the others. So do canaries: what runs cost is counted, and they are not.
    """
    if len(in_hand) > 1:
        in_hand.sort(key=lambda lease: lease.suspect)
    first = in_hand.pop(0)
    group, rows = [first], first.rows
    if first.suspect or first.header.canary:
        return group
    shapes = [tensor.inner for tensor in first.header.inputs]
    while in_hand and in_hand[0].lane == first.lane:
        other = in_hand[0]
        if other.suspect or other.header.canary or rows + other.rows > rows_max:
            break
        if [tensor.inner for tensor in other.header.inputs] != shapes:
            break
        group.append(in_hand.pop(0))
        rows += other.rows
    return group


def run(
    group: Sequence[Lease],
    holding: LoadedModel,
    segments: Segments,
    clock: RedisClock,
    on_no_memory: Callable[[int], None] = lambda _: None,
    on_halves: Callable[[int], None] = lambda _: None,
    guarded: Guarded | None = None,
    keep: Keep | None = None,
) -> list[RunResult]:
    """Run leases of one lane together; never raises for what a model or a caller did, but Terminated for a run whose
    time, as `guarded` has it, was over.

    `on_no_memory`: called with the rows of a run that found no memory, before its halves are tried if it has any.
    `on_halves`: called with the same number when they ran. `keep`: sees the inputs and outputs of a run of several rows.
    """
    began = time.perf_counter()
    now_ms = clock.now_ms()
    live: list[Lease] = []
    arrays: list[Inputs] = []
    signature = holding.manifest.signature
    for lease in group:
        lease.drop_expired(now_ms)
        if not lease.alive:
            continue
        try:
            arrays.append(input_arrays(lease, signature, segments))
        except (Failure, ValueError, MemoryError) as error:  # its gateway, or its blob, is gone; or there is no room
            for position in list(lease.alive):
                lease.fail(
                    position, Code.UNAVAILABLE, f"the tensors of the request cannot be had: {str(error) or 'no memory'}"
                )
        else:
            live.append(lease)
    results: dict[int, list[Array] | None] = {}
    rows = sum(lease.rows for lease in live)
    runner = _Runner(holding, on_no_memory, on_halves, guarded, keep)
    if live:
        try:
            merged = arrays[0]
            if len(live) > 1:
                merged = {name: np.concatenate([part[name] for part in arrays]) for name in merged}
        except MemoryError:
            on_no_memory(rows)
            results = {i: _outputs([lease], runner, arrays[i])[0] for i, lease in enumerate(live)}
            if None not in results.values():
                on_halves(rows)
        else:
            results = _outputs(live, runner, merged)
    execution_s = time.perf_counter() - began if live else 0.0
    input_s = runner.began - began if runner.began else 0.0
    shared = RunCost(now_ms, input_s, runner.seconds, execution_s - input_s - runner.seconds, rows, [])
    first = shared._replace(runs=runner.runs)  # the runs stand in one reply: so they are counted once
    places = {id(lease): i for i, lease in enumerate(live)}
    return [
        RunResult(lease, results.get(place), execution_s, first if place == 0 else shared)
        for lease in group
        for place in (places.get(id(lease), -1),)
    ]


class _Runner:
    """Runs rows of one instance, in as many pieces as its memory asks for.

    `began`: when the first run began; `seconds`: what all runs took; `runs`: the rows of those that succeeded.
    """

    def __init__(
        self,
        holding: LoadedModel,
        on_no_memory: Callable[[int], None],
        on_halves: Callable[[int], None],
        guarded: Guarded | None,
        keep: Keep | None,
    ) -> None:
        self._holding = holding
        self._guarded = guarded
        self._keep = keep
        self.alone = bool(holding.alone)  # requests share no runs
        self._on_no_memory = on_no_memory
        self._on_halves = on_halves
        self.began = 0.0
        self.seconds = 0.0
        self.runs: list[int] = []

    def run(self, inputs: Inputs) -> list[Array]:
        """Outputs for all rows of `inputs`. Raises Failure."""
        try:
            return self._run_once(inputs)
        except OutOfMemory:
            rows = _rows(inputs) if self._holding.manifest.signature.batching else 1
            self._on_no_memory(rows)
            if rows < 2 or self._holding.alone:  # rows that influence each other are not parted
                raise
        halves = [self.run(_part(inputs, part)) for part in (slice(rows // 2), slice(rows // 2, None))]
        self._on_halves(rows)
        try:
            return [np.concatenate(column) for column in zip(*halves, strict=True)]
        except MemoryError as error:
            raise OutOfMemory(f"no memory for the outputs of {rows} rows") from error

    def _run_once(self, inputs: Inputs) -> list[Array]:
        holding = self._holding
        signature = holding.manifest.signature
        if holding.instance is None:
            raise Failure(
                Code.UNAVAILABLE, f"version {holding.manifest.version} of {holding.manifest.model} is not loaded"
            )
        began = time.perf_counter()
        self.began = self.began or began
        try:
            try:
                outputs = list(holding.instance.run(inputs))
            except Terminated:
                if self._guarded is not None and self._guarded.expired:
                    raise
                outputs = list(holding.instance.run(inputs))  # it was meant for the run before, which was over by then
        finally:
            self.seconds += time.perf_counter() - began
        rows = _rows(inputs)
        check_outputs(outputs, signature, rows)
        self.runs.append(rows if signature.batching else 1)
        if self._keep is not None and rows > 1:
            self._keep(inputs, outputs)
        return outputs


def _rows(inputs: Inputs) -> int:
    """Dimension 0 of the inputs; 0 when there is none."""
    for array in inputs.values():
        return int(array.shape[0]) if array.ndim else 0
    return 0


def _part(inputs: Inputs, rows: slice) -> Inputs:
    return {name: array[rows] for name, array in inputs.items()}


def _outputs(live: Sequence[Lease], runner: _Runner, inputs: Inputs) -> dict[int, list[Array] | None]:
    """Outputs by position in `live`; requests at fault are failed in their lease."""
    if runner.alone and sum(len(lease.alive) for lease in live) > 1:
        return _bisect(live, runner, inputs, None)
    outputs, error = _tried(runner, inputs)
    if outputs is None:
        return _bisect(live, runner, inputs, error)
    if len(live) == 1:
        return {0: outputs}
    bounds = np.cumsum([0, *(lease.rows for lease in live)])
    return {i: [array[bounds[i] : bounds[i + 1]] for array in outputs] for i in range(len(live))}


def _tried(runner: _Runner, inputs: Inputs) -> tuple[list[Array] | None, RequestError]:
    """Outputs, or what became of the run: not the exception, whose traceback would keep all arrays of the run."""
    try:
        return runner.run(inputs), NO_ERROR
    except Terminated:
        raise
    except Failure as failure:
        return None, RequestError(failure.code, failure.message)


def _bisect(
    live: Sequence[Lease], runner: _Runner, inputs: Inputs, known: RequestError | None
) -> dict[int, list[Array] | None]:
    """Halve the failed run until each failure has one request; log2(requests) more runs for one culprit.

    `known`: the error of the run of all of them; None: nothing ran yet, and each request is to run alone.
    """
    requests = [(i, position) for i, lease in enumerate(live) for position in lease.alive]
    rows = np.cumsum([0, *(live[i].header.rows[position] for i, position in requests)])
    pieces: dict[int, list[list[Array]]] = {i: [] for i in range(len(live))}
    left = [(0, len(requests))] if known is not None else [(k, k + 1) for k in reversed(range(len(requests)))]
    while left:
        low, high = left.pop()
        error, known = known, None
        if error is None:
            outputs, error = _tried(runner, _part(inputs, slice(rows[low], rows[high])))
            if outputs is not None:
                for k in range(low, high):
                    part = [array[rows[k] - rows[low] : rows[k + 1] - rows[low]] for array in outputs]
                    pieces[requests[k][0]].append(part)
                continue
        if high - low == 1:
            i, position = requests[low]
            live[i].fail(position, error.code, error.message)
        else:
            middle = (low + high) // 2
            left += [(middle, high), (low, middle)]
    return {i: _joined(live[i], parts) for i, parts in pieces.items()}


def _joined(lease: Lease, parts: list[list[Array]]) -> list[Array] | None:
    """The outputs of a lease whose requests ran in several parts."""
    try:
        return [np.concatenate(column) for column in zip(*parts, strict=True)] if parts else None
    except MemoryError:
        for position in list(lease.alive):
            lease.fail(position, Code.MODEL, "there was no memory for the outputs")
        return None
