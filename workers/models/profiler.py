"""Runs a new instance with generated inputs of 1, 2, 4, … rows and measures how long each size takes.

signature ─> inputs that run ─> for each size: one warm-up run, then the fastest of a few ─> Profile
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.model.profile import Profile
from millstream.services.model.signature import Signature
from millstream.services.model.warmup_inputs import (
    FILLS,
    INPUT_BYTES_MAX,
    VARIABLE_SIZES,
    has_variable_dims,
    input_bytes,
    make_inputs,
    requested_inputs,
    requested_rows,
    run_sizes,
)
from millstream.workers.backends.base import Array, Instance, OutOfMemory, Terminated, check_outputs

Clock = Callable[[], float]

PROFILES_MAX = 10_000  # beyond, the version that was loaded the longest ago is measured again
RUNS_MIN = 3
RUNS_MAX = 9
#: Share of the budget that one size may use beyond its first RUNS_MIN runs.
SIZE_SHARE = 0.05


def _runnable(instance: Instance, signature: Signature) -> tuple[int, int] | None:
    """Return the first (size, fill) with which one row runs; None if the model accepts only meaningful inputs.

    Raises OutOfMemory if that is the reason why the only size does not run.
    """
    variable = has_variable_dims(signature)
    for size in VARIABLE_SIZES if variable else (1,):
        if input_bytes(signature, 1, size) > INPUT_BYTES_MAX:
            continue
        for fill in FILLS:
            try:
                instance.run(make_inputs(signature, 1, size, fill))
            except Terminated:
                raise
            except OutOfMemory:
                if not variable:
                    raise
            except Failure:
                continue
            else:
                return size, fill
    return None


def _timed(instance: Instance, inputs: dict[str, Array], clock: Clock, budget_s: float) -> float:
    """Return the seconds of the fastest run. The first run of a size allocates memory and is not counted.

    The fastest run is used and not the median, since other programs slow some runs down and sizes are compared.
    """
    instance.run(inputs)
    spans: list[float] = []
    began = clock()
    while len(spans) < RUNS_MIN or (len(spans) < RUNS_MAX and clock() - began < budget_s):
        started = clock()
        instance.run(inputs)
        spans.append(clock() - started)
    return min(spans)


def measure(
    instance: Instance, signature: Signature, rows_max: int, budget_s: float, clock: Clock = time.perf_counter
) -> Profile:
    """Measure runs of 1, 2, 4, … `rows_max` rows, as many sizes as `budget_s` seconds allow and at least one.

    A size is skipped if it is not expected to fit into the rest of the budget (twice the last size's time for each
    run). A model that accepts none of the generated inputs gets an empty profile: only real requests can be measured.
    Raises Failure(MODEL) if the model runs one row and fails with more, or finds no memory for one row.
    """
    began = clock()
    found = _runnable(instance, signature)
    if found is None:
        return Profile({})
    size, fill = found
    seconds: dict[int, float] = {}
    for rows in run_sizes(signature, rows_max):
        expected = 2 * (RUNS_MIN + 1) * max(seconds.values(), default=0.0)
        if seconds and (clock() - began + expected > budget_s or input_bytes(signature, rows, size) > INPUT_BYTES_MAX):
            break
        inputs = make_inputs(signature, rows, size, fill)
        try:
            seconds[rows] = _timed(instance, inputs, clock, budget_s * SIZE_SHARE)
        except OutOfMemory:
            if not seconds:
                raise
            break  # fewer rows fit
        except Failure as failure:
            largest = max(seconds, default=1)
            message = f"the model runs {largest} rows but not {rows}: {failure.message}; set rows_max to {largest}"
            raise Failure(Code.MODEL, message) from failure
    return Profile(seconds)


def runs_as_known(instance: Instance, signature: Signature, known: Profile, *, whole: bool = True) -> bool:
    """Run one row and, with `whole`, the most rows that were measured before, once; return whether all of it runs.

    A version that is loaded again need not be measured again: a call may wait for it.
    """
    found = _runnable(instance, signature)
    if found is None:
        return not known.seconds
    if not whole:
        return bool(known.seconds)
    largest = max(known.seconds, default=1)
    try:
        instance.run(make_inputs(signature, largest, *found))
    except Terminated:
        raise
    except (OutOfMemory, Failure):
        return False
    return bool(known.seconds)


class KnownProfiles:
    """The profiles that this process measured, by content id. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._profiles: OrderedDict[str, Profile] = OrderedDict()

    def get(self, content_id: str) -> Profile | None:
        with self._lock:
            return self._profiles.get(content_id)

    def keep(self, content_id: str, profile: Profile) -> None:
        with self._lock:
            self._profiles[content_id] = profile
            self._profiles.move_to_end(content_id)
            while len(self._profiles) > PROFILES_MAX:
                self._profiles.popitem(last=False)


def warm_up(instance: Instance, manifest: Manifest, folder: Path) -> None:
    """Run all warm-up requests; `folder` has the version's files. Raises Failure(MODEL) with the request's name."""
    signature = manifest.signature
    for warmup in manifest.config.warmup:
        try:
            inputs = requested_inputs(warmup, signature, folder)
            for _ in range(warmup.count):
                check_outputs(list(instance.run(inputs)), signature, requested_rows(warmup, signature))
        except (Failure, OSError, ValueError) as error:
            why = error.message if isinstance(error, Failure) else str(error)
            raise Failure(Code.MODEL, f"warm-up {warmup.name[:80]!r} failed: {why}") from error
