"""sample_capture: keeps copies of a few rows of live requests as samples for a race, if the endpoint allows it.

main loop: a run of a version with `capture_samples` ─> copies of at most ROWS_EACH rows ─> Capture
races thread: Capture is full, or old enough ─> captured.npz of the version, mode 0600; deleted after its race, however
that ended, or a day

Off unless the endpoint's settings ask for it: samples are users' data.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from millstream.plugins.compile.stored.races import Race, RaceState
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.repository.base import Repository
from millstream.services.repository.verdicts import content_digest
from millstream.services.wire.records import State
from millstream.workers.backends.base import Array
from millstream.workers.models.loaded_models import LoadedModels

log = logging.getLogger("millstream.races")

ROWS_EACH = 4  # of one run
BYTES_MAX = 32 << 20  # of one version; fewer rows are kept if they are large
PAUSE_S = 0.02  # between two runs of which rows are kept: they come from many callers
WRITE_S = 30.0  # after the first row, what there is is written, also if it is not full
LIFE_S = 86_400.0  # after which samples that no race used are deleted
SWEEP_S = 600.0  # interval at which those of all versions are looked at, also of versions that are not loaded


#: The end of a race: its name, and the instant.
Mark = tuple[str, float]
_USED = frozenset({RaceState.DECIDED, RaceState.FAILED, RaceState.CANCELLED})  # an unfinished race goes on later


class Capture:
    """The rows of one version. `keep` is called by the main loop, `take` by another thread, one after the other."""

    def __init__(self, manifest: Manifest, rows_max: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.manifest = manifest
        self.full = False
        self.began = 0.0  # when the first row was kept, or a write was tried
        self.written = 0.0  # when a write was tried last
        self.ends: frozenset[Mark] | None = None  # of races of the version that were over before it began
        self._rows_left = rows_max if manifest.signature.batching else 1
        self._bytes_left = BYTES_MAX
        self._clock = clock
        self._next = 0.0
        self._inner: dict[str, tuple[int, ...]] = {}
        self._pieces: list[dict[str, Array]] = []

    def due(self, now: float) -> bool:
        return now >= self._next and not self.full

    def keep(self, inputs: Mapping[str, Array], outputs: Sequence[Array]) -> None:
        """Copy rows of a run, before its memory is reused; rows of another shape than the first are left out."""
        del outputs  # those of a compiled form are no reference
        self._next = self._clock() + PAUSE_S
        batching = self.manifest.signature.batching
        inner = {name: array.shape[1:] if batching else array.shape for name, array in inputs.items()}
        if any(array.dtype == object for array in inputs.values()) or (self._inner and inner != self._inner):
            return
        try:
            rows = slice(min(ROWS_EACH, self._rows_left)) if batching else slice(None)
            piece = {name: array[rows].copy() for name, array in inputs.items()}
        except (MemoryError, IndexError):
            return
        size = sum(array.nbytes for array in piece.values())
        if size > self._bytes_left:
            self.full = True
            return
        self._inner, self.began = inner, self.began or self._clock()
        self._bytes_left -= size
        self._rows_left -= len(next(iter(piece.values()))) if batching and piece else 1
        self._pieces.append(piece)
        self.full = self._rows_left <= 0

    def is_due_to_be_written(self, now: float) -> bool:
        """Return whether it is full and was not tried to be written, or its rows wait for WRITE_S."""
        return (self.full and not self.written) or (self.began > 0 and now - self.began >= WRITE_S)

    def take(self) -> dict[str, Array]:
        """Return the rows so far, by the names that samples have; empty: there are none."""
        pieces = list(self._pieces)
        if not pieces:
            return {}
        if not self.manifest.signature.batching:
            return {f"input/{name}": array for name, array in pieces[0].items()}
        return {f"input/{name}": np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

    def drop_rows(self) -> None:
        """Give the memory of the rows back: they were written."""
        self._pieces.clear()


class SampleCaptures:
    """The captures of one worker. Called by one thread, except for `write` and `forget`.

    Args:
        repository: has the endpoints' settings, and keeps the samples.
        activate: gives the main loop the captures by content id, after each change.
    """

    def __init__(
        self, repository: Repository, models: LoadedModels, activate: Callable[[Mapping[str, Capture]], None]
    ) -> None:
        self._repository = repository
        self._models = models
        self._activate = activate
        self._token = ""
        self._ready: set[str] = set()  # content ids
        self._asked: dict[str, tuple[int, int]] = {}  # model -> rows, generation of its endpoint
        self._begun: dict[str, int] = {}  # content id -> generation of the endpoint that asked for it
        self._active: dict[str, Capture] = {}
        self._unused: dict[str, Capture] = {}  # also those that are complete: their samples wait for a race
        self._lock = threading.Lock()  # a capture that a race ends must not be set, or written, again
        self._sweep_at = 0.0  # monotonic; at once: the settings may have changed while no worker ran

    def follow(self) -> None:
        """Begin and end captures as the endpoints' settings are now, and write what is full or old enough."""
        token = self._repository.token()
        loaded = {
            content_id: model.manifest for content_id, model in self._models.all().items() if model.state is State.READY
        }
        if token != self._token or loaded.keys() != self._ready:
            changed = self._repository.changed_since(self._token, token)
            self._token, self._ready = token, set(loaded)
            models = {manifest.model for manifest in loaded.values()}
            kept = set() if changed is None else models - changed
            self._asked = {model: one for model, one in self._asked.items() if model in kept}
            with self._lock:
                self._set(self._wanted(loaded))
        for content_id, capture in list(self._active.items()):
            if capture.is_due_to_be_written(time.monotonic()):
                self.write(content_id)
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + SWEEP_S
            self._repository.samples.sweep(lambda model: self._asked_of(model)[0] > 0, LIFE_S)
            self._forget_swept()

    def _forget_swept(self) -> None:
        """Follow no longer what is complete and has no samples: they were swept, or deleted with their version."""
        samples = self._repository.samples
        with self._lock:
            for content_id, capture in list(self._unused.items()):
                if content_id not in self._active and samples.find(capture.manifest) is None:
                    del self._unused[content_id]

    def end_used(self, races: Sequence[Race]) -> None:
        """End the captures whose rows a race has used, and delete these rows.

        Another worker may have run the race, whose capture has ended. And a capture may have been written, for the last
        time, after the rows were deleted: it is followed until a race that ended later is seen.
        """
        for capture in list(self._unused.values()):
            manifest = capture.manifest
            ends = frozenset(
                (race.key.name, race.ended_at)
                for race in races
                if race.state in _USED
                and (race.model, race.version) == (manifest.model, manifest.version)
                and race.content == content_digest(manifest)
            )
            if capture.ends is not None and ends - capture.ends:
                self.forget(manifest)
            else:
                capture.ends = ends

    def write(self, content_id: str) -> None:
        """Write what was captured of a version so far; a full capture ends. A failed write is tried again later."""
        with self._lock:
            capture = self._active.get(content_id)
            complete = capture is not None and capture.full  # asked before its rows are taken: no row is added then
            rows = capture.take() if capture is not None else {}
            if capture is None or not rows:
                return
            capture.began = capture.written = time.monotonic()
            try:
                self._repository.samples.write(capture.manifest, rows, captured=True)
            except Failure as failure:
                log.warning("samples of %s cannot be written: %s", content_id, failure.message)
                complete = failure.code is Code.NOT_FOUND  # the version was deleted; a disk may have space later
                if complete:
                    self._unused.pop(content_id, None)
            if complete:
                self._end(content_id)
                capture.drop_rows()

    def forget(self, manifest: Manifest) -> None:
        """Capture no more of a version, until its endpoint's settings change, and delete what was captured."""
        with self._lock:
            self._end(manifest.content_id)
            self._unused.pop(manifest.content_id, None)
            self._repository.samples.forget_captured(manifest)

    def _end(self, content_id: str) -> None:
        self._set({name: one for name, one in self._active.items() if name != content_id})

    def _set(self, active: dict[str, Capture]) -> None:
        self._active = active
        self._activate(active)

    def _wanted(self, loaded: Mapping[str, Manifest]) -> dict[str, Capture]:
        """Return the captures that the endpoints ask for; each setting of an endpoint asks once."""
        active: dict[str, Capture] = {}
        for content_id, manifest in loaded.items():
            rows, generation = self._asked_of(manifest.model)
            if not rows:
                self._unused.pop(content_id, None)
                if self._begun.pop(content_id, None) is not None:
                    self._repository.samples.forget_captured(manifest)
            elif self._begun.get(content_id) == generation:
                active |= {content_id: self._active[content_id]} if content_id in self._active else {}
            else:
                self._begun[content_id] = generation
                active[content_id] = self._unused[content_id] = Capture(manifest, rows)
        return active

    def _asked_of(self, model: str) -> tuple[int, int]:
        """Return how many rows an endpoint asks for, and its generation."""
        if model not in self._asked:
            try:
                endpoint = self._repository.endpoint(model)
            except Failure:
                return 0, 0
            self._asked[model] = (endpoint.placement.capture_samples, endpoint.generation)
        return self._asked[model]
