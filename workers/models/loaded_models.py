"""The versions and instances of a worker, written by loads and unloads and read by the main loop.

Every change replaces a whole immutable value in one dict assignment, so the main loop reads without a lock.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from millstream.services.model.manifest import Manifest
from millstream.services.model.profile import Profile
from millstream.services.placement.views import Footprint
from millstream.services.repository.verdicts import Verdict
from millstream.services.wire.records import ErrorRecord, InstanceRecord, State
from millstream.workers.backends.base import Instance
from millstream.workers.models.record_parts import BeatSignal, LastErrors
from millstream.workers.models.usage_log import Calls, Known, UsageLog

#: Records show calls at most this old: a record that changes is read and parsed by every gateway.
USAGE_PUBLISHED_S = 5.0
#: A profile is published again when a run takes longer or shorter by this share, and by this time at least.
PROFILE_STEP = 0.2
PROFILE_STEP_S_MIN = 500e-6
#: A Redis clock that moved further against the monotonic clock was set: instants are published anew. Drift takes hours.
CLOCK_STEP_S = 1.0


#: Weight of the latest run in the known time of its size.
CORRECTION = 0.1
#: Runs of a size before deciding whether to run that many rows; the fastest run counts.
TRIALS = 3
#: A size is measured only if it is this many times the largest measured size, so that few are kept.
STEP = 1.5


class Exploration:
    """Run times of one instance by size. `measured`, rows -> seconds from the warm-up, is changed in place."""

    def __init__(self, measured: dict[int, float], rows_max: int) -> None:
        self._measured = measured
        self._largest = max(measured, default=0)
        self._rows_max = rows_max
        self._complete = self._largest >= rows_max
        self._runs: dict[int, int] = {}  # number of runs of each measured size, while larger sizes are left to try

    def ran(self, rows: int, seconds: float, rows_fitting: int) -> int | None:
        """Record a run; returns how many rows should run together from now on, or None for no change.

        `rows_fitting` is the largest number of rows that fit into memory.
        """
        measured, largest = self._measured, self._largest
        known = measured.get(rows)
        if self._complete:
            if known is not None:
                measured[rows] = known + (seconds - known) * CORRECTION
            return None
        seen = self._runs.get(rows, 0)
        if known is None:
            if largest and rows < min(STEP * largest, self._rows_max):
                return None
            measured[rows] = seconds
            self._largest = rows
        elif not seen:
            # The warm-up used generated inputs: sizes are compared by the times of real requests.
            measured[rows] = seconds
        elif seen < TRIALS and rows == largest:
            measured[rows] = min(known, seconds)
        else:
            measured[rows] = known + (seconds - known) * CORRECTION
        self._runs[rows] = seen + 1
        self._complete = rows >= self._rows_max and seen + 1 >= TRIALS
        return self._target(rows_fitting) if seen < TRIALS else None

    def _target(self, rows_fitting: int) -> int:
        target = Profile(self._measured).rows_worth_running(self._rows_max)
        if target < self._largest and 0 < self._runs.get(self._largest, 0) < TRIALS:
            target = self._largest  # the first run of a size, or a disturbed run, says little
        return max(1, min(target, rows_fitting))


class DirectGate:
    """One for each load of a version. Redis does not know of these batches, so `release_lane` cannot see them.

    The main loop enters before it looks whether the gate is closed, and an unload closes it before it looks whether
    anything is inside: at least one of them sees the other.
    """

    __slots__ = ("closed", "inside")

    def __init__(self) -> None:
        self.closed = False  # written by unloads
        self.inside = 0  # written by the main loop

    def enter(self) -> bool:
        """Count a batch; False: the version is being unloaded, and the batch is not counted."""
        self.inside += 1
        if self.closed:
            self.inside -= 1
            return False
        return True

    def leave(self) -> None:
        """Count a batch as answered."""
        self.inside -= 1

    def close(self) -> bool:
        """Admit no more batches; False, and the gate stays open, if one is inside."""
        self.closed = True
        if self.inside:
            self.closed = False
            return False
        return True


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A version in this worker."""

    manifest: Manifest
    state: State
    reason: str | None = None  # of a failure
    instance: Instance | None = None  # set when it is warming or ready
    rows_efficient: int = 1  # more rows in one run gain almost nothing
    rows_fitting: int = 1 << 30  # more rows found no memory
    measured: dict[int, float] = field(default_factory=dict)  # rows of a run -> seconds; corrected by the main loop
    exploration: Exploration | None = None  # corrects `measured`
    retry_at: float = 0.0  # of a failed load: when it is tried again (monotonic); 0: an operator decides
    footprint: Footprint | None = None  # measured; None: not yet
    loaded_at: float = 0.0  # instant at which it became ready (monotonic); 0: not yet
    alone: str = ""  # why requests share no runs although the version supports batching; "": they may share runs
    why: str = ""  # why it was loaded, for people
    demanded: bool = False  # a call waited for its load
    staged: bool = False  # it was loaded before it was published, for a client that asked for the load
    calls: Calls = field(default_factory=Calls)  # written by the main loop
    gate: DirectGate = field(default_factory=DirectGate)  # of batches that were dispatched directly
    variant: str = ""  # targets of the compiled forms that serve; "": the version's own file

    @property
    def rows_max(self) -> int:
        return self.manifest.config.rows_max if self.manifest.signature.batching else 1

    @property
    def rows_merged_max(self) -> int:
        """The limit of rows when batches are merged into one run."""
        return 1 if self.alone else min(self.rows_max, self.rows_efficient)

    @property
    def lost(self) -> str:
        """Why its instance cannot run any longer; empty: it can, or there is none."""
        return self.instance.lost if self.instance is not None else ""

    def run_s(self, rows: int) -> float:
        """Return the seconds of a run as measured with this or the next larger number of rows; 0: not measured."""
        larger = [seconds for measured, seconds in self.measured.items() if measured >= rows]
        return min(larger) if larger else max(self.measured.values(), default=0.0)

    def record(self, known: Known, offset_s: float, errors: tuple[ErrorRecord, ...]) -> InstanceRecord:
        """Return the record to publish."""
        return InstanceRecord(
            content_id=self.manifest.content_id,
            model=self.manifest.model,
            version=self.manifest.version,
            state=self.state,
            reason=self.reason,
            profile=dict(self.measured),
            rows_max=self.rows_max,
            rows_efficient=self.rows_merged_max,
            resident_bytes=self.footprint.resident_bytes if self.footprint else 0,
            peak_bytes=self.footprint.peak_bytes if self.footprint else 0,
            device_resident_bytes=self.footprint.device_resident_bytes if self.footprint else 0,
            device_peak_bytes=self.footprint.device_peak_bytes if self.footprint else 0,
            load_s=self.footprint.load_s if self.footprint else 0.0,
            loaded_at=_shifted(self.loaded_at, offset_s),
            last_used=_shifted(known.last_used, offset_s),
            usage=known.usage.pack(),
            runs=self.calls.runs,
            busy_s=round(self.calls.busy_s, 6),
            why=self.why,
            retry_at=_shifted(self.retry_at, offset_s),
            variant=self.variant,
            batches=self.calls.sizes(),
            errors=errors,
        )


class _Published(NamedTuple):
    """A record as it was last published.

    Args:
        runs: of the instance when the record was last compared: only a run corrects what was measured.
        at: monotonic.
        offset_s: the Redis clock minus the monotonic clock, with which its instants were made.
    """

    model: LoadedModel
    known: Known
    record: InstanceRecord
    runs: int
    at: float
    offset_s: float

    def is_outdated(
        self, model: LoadedModel, runs: int, now: float, offset_s: float, errors: tuple[ErrorRecord, ...]
    ) -> bool:
        """Return whether the record no longer says what it should of the model, after so many runs and `now`."""
        if self.model is not model or abs(offset_s - self.offset_s) > CLOCK_STEP_S:
            return True
        if self.runs != runs and _differ(self.record.profile, dict(model.measured)):
            return True
        called = model.calls.last != self.known.last_used or errors != self.record.errors
        return called and now - self.at >= USAGE_PUBLISHED_S


def _shifted(instant: float, offset_s: float) -> float:
    """Return an instant of the monotonic clock on the Redis clock; 0, which is none, stays 0."""
    return round(instant + offset_s, 3) if instant else 0.0


def _differ(published: Mapping[int, float], measured: Mapping[int, float]) -> bool:
    """Return whether a profile differs from the published one by more than noise: probes of idle models correct it."""
    if published.keys() != measured.keys():
        return True
    return any(
        abs(measured[rows] - seconds) > max(PROFILE_STEP * seconds, PROFILE_STEP_S_MIN)
        for rows, seconds in published.items()
    )


class LoadedModels:
    """Versions by content id, which is also the lane's name. `signal` is set after each change.

    Args:
        offset_s: returns the Redis clock minus the monotonic clock.
    """

    def __init__(
        self,
        usage: UsageLog | None = None,
        offset_s: Callable[[], float] = lambda: 0.0,
        signal: BeatSignal | None = None,
    ) -> None:
        self.signal = signal or BeatSignal()
        self.usage = usage or UsageLog()
        self.errors = LastErrors()
        self._offset_s = offset_s
        self._models: dict[str, LoadedModel] = {}
        self.lost = threading.Event()  # set when a run found that its instance is lost, for the reconciler
        self._changing = threading.Lock()
        self._records: dict[str, _Published] = {}
        #: Locked while lanes are added to Redis or removed from it: no lane is added that was just removed.
        self.changing_lanes = threading.Lock()

    def get(self, content_id: str) -> LoadedModel | None:
        return self._models.get(content_id)

    def all(self) -> dict[str, LoadedModel]:
        return dict(self._models)

    def set(self, model: LoadedModel) -> None:
        with self._changing:
            self._models[model.manifest.content_id] = model
        if model.state in {State.LOADING, State.WARMING}:
            self.signal.soon()  # progress of a load may be published a moment later
        else:
            self.signal.now()

    def move(self, content_id: str, state: State, reason: str | None = None) -> None:
        """Change the state of a version, unless it was removed."""
        with self._changing:
            model = self._models.get(content_id)
            if model is not None:
                self._models[content_id] = replace(model, state=state, reason=reason)
        self.signal.now()

    def learn(self, content_id: str, exploration: Exploration | None, rows: int, *, fitting: int | None = None) -> None:
        """Set the number of rows that run together, unless `exploration` belongs to an instance that was replaced.

        `fitting` is the largest number of rows that there is memory for, if it is known.
        """
        with self._changing:
            model = self._models.get(content_id)
            if model is None or model.exploration is not exploration:
                return
            limit = model.rows_fitting if fitting is None else min(fitting, model.rows_fitting)
            self._models[content_id] = replace(model, rows_efficient=rows, rows_fitting=limit)
        self.signal.now()

    def swap(
        self, model: LoadedModel, instance: Instance, measured: dict[int, float], rows_efficient: int, variant: str
    ) -> bool:
        """Serve a version with another instance from the next run on; False: `model` serves no longer.

        No lane is added or removed: the version has the same content. The instance before is the caller's to close.
        """
        with self.changing_lanes, self._changing:  # an eviction looks up the instance that it closes
            present = self._models.get(model.manifest.content_id)
            if present is None or present.state is not State.READY or present.instance is not model.instance:
                return False
            self._models[model.manifest.content_id] = replace(
                present,
                instance=instance,
                measured=measured,
                exploration=Exploration(measured, present.rows_max),
                rows_efficient=rows_efficient,
                rows_fitting=1 << 30,
                variant=variant,
            )
        self.signal.now()
        return True

    def run_alone(self, content_id: str, reason: str) -> None:
        """Stop batching requests of a version, for `reason`; an empty reason turns batching on again."""
        with self._changing:
            model = self._models.get(content_id)
            if model is None or model.alone == reason:
                return
            self._models[content_id] = replace(model, alone=reason)
        self.signal.now()

    def resized(self, content_id: str, footprint: Footprint) -> None:
        """Change what a loaded version takes, unless it was removed."""
        with self._changing:
            model = self._models.get(content_id)
            if model is not None and model.state is State.READY:
                self._models[content_id] = replace(model, footprint=footprint)
        self.signal.soon()

    def remove(self, content_id: str) -> None:
        with self._changing:
            self._models.pop(content_id, None)
        self.signal.now()

    def records(self) -> tuple[InstanceRecord, ...]:
        """Return the records to publish; an unchanged record is the same object as last time."""
        now, offset_s = time.monotonic(), self._offset_s()
        records: dict[str, _Published] = {}
        for content_id, model in self.all().items():
            last, runs, errors = self._records.get(content_id), model.calls.runs, self.errors.of(content_id)
            if last is None or last.is_outdated(model, runs, now, offset_s, errors):
                known = self.usage.fold(content_id, model.calls)
                last = _Published(model, known, model.record(known, offset_s, errors), runs, now, offset_s)
            elif last.runs != runs:
                last = last._replace(runs=runs)
            records[content_id] = last
        self._records = records
        return tuple(one.record for one in records.values())

    def lanes(self) -> dict[str, Calls]:
        """Return the content ids that can run now, each with an object of its own for each instance."""
        return {content_id: model.calls for content_id, model in self.all().items() if model.state is State.READY}


class BatchingVerdicts:
    """Applies verdicts on batching. Called by one thread at a time."""

    def __init__(self, models: LoadedModels) -> None:
        self._models = models
        self._alone: set[str] = set()  # content ids that are not batched because of their verdict

    def apply(self, content_id: str, verdict: Verdict) -> None:
        """Let a loaded version follow its verdict."""
        if verdict.batching_off:
            self._alone.add(content_id)
            self._models.run_alone(content_id, verdict.batching_off)
        elif content_id in self._alone:
            self._alone.discard(content_id)
            self._models.run_alone(content_id, "")

    def forget(self, content_id: str) -> None:
        """Forget a version that was removed."""
        self._alone.discard(content_id)
