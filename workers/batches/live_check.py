"""The live check: compares rows that shared a run with the same rows run alone, on copies of a few live batches.

a shared run, one of N ─> RowSample (copies of some rows) ─> when idle: run a row alone, compare ─> … ─> agrees
                                          it differs ─> is it the other rows? ─> batching off for the version
a run of a compiled form, one a second ─> RowSample ─> when idle: run it with the version's own file ─> agrees
                                                                        it differs ─> the form is undone

A row may give other outputs alone although rows do not influence each other: the number of rows changes the order of
summation, and a model that rounds turns a small difference into a step. Such a row therefore runs again, in a batch of
the same size that is filled with copies of it. If the outputs equal those of the live batch, the other rows had no
influence, and only a large difference counts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple, Protocol, cast

import numpy as np

from millstream.services.errors import Code, Failure
from millstream.services.model.agreement import REPEATED, column_scale, disagreeing_rows
from millstream.services.model.datatypes import FLOATS
from millstream.services.model.manifest import Manifest
from millstream.services.model.signature import Signature
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.verdicts import Verdict
from millstream.workers.backends.base import Array, Instance, OutOfMemory
from millstream.workers.metrics import WorkerMetrics
from millstream.workers.models.loaded_models import LoadedModel, LoadedModels

log = logging.getLogger("millstream.live_check")

ROWS_MAX = 16  # rows of one batch that are checked
BYTES_MAX = 16 << 20  # total size of the copied rows of one batch
#: A difference above this, relative to its column, is not due to rounding.
LOOSE = 0.05
#: How long an idle worker waits for work before it runs the next row.
IDLE_WAIT_S = 0.05
#: A worker that is never idle still runs one row in this time.
BUSY_STEP_S = 1.0

#: The comparisons of forms take at most this share of a worker's time.
FORMS_SHARE = 0.02

Run = Callable[[LoadedModel, Mapping[str, Array]], Sequence[Array]]


class Outcome(StrEnum):
    """The outcome of a check.

    FORM_DIFFERS: a compiled form gave another answer than the version's own file. UNDECIDED: the model is not
    deterministic, was unloaded, or found no memory.
    """

    AGREES = "agrees"
    DIFFERS = "differs"
    FORM_DIFFERS = "form_differs"
    UNDECIDED = "undecided"


class RowSample(NamedTuple):
    """Copies of rows of a live run."""

    content_id: str
    rows: int  # of the whole run
    positions: list[int]  # of the copied rows in the run
    inputs: dict[str, Array]
    outputs: list[Array]
    form: str = ""  # key of the compiled form that ran; "": the version's own file


class Form(Protocol):
    """An instance that runs batches with a compiled form.

    `form` is its `key` if it made the last run, "" if the version's own file did, which is `baseline`.
    """

    key: str
    form: str
    baseline: Instance

    def fall_back(self, reason: str) -> None:
        """Run everything with the version's own file from the next run on."""

    def difference(self, expected: Sequence[Array], outputs: Sequence[Array]) -> str:
        """Return how outputs of the form differ from those that are expected; empty: they agree well enough."""


def sampled(content_id: str, inputs: Mapping[str, Array], outputs: Sequence[Array]) -> RowSample | None:
    """Copy rows evenly spread over a run, up to the limits; None if a single row is too large."""
    rows = len(outputs[0])
    row_bytes = sum(_bytes(array[:1]) for array in (*inputs.values(), *outputs))
    count = min(rows, ROWS_MAX, BYTES_MAX // max(1, row_bytes))
    if count < 1:
        return None
    positions = sorted({round(at) for at in np.linspace(0, rows - 1, count)})
    return RowSample(
        content_id,
        rows,
        positions,
        {name: array[positions] for name, array in inputs.items()},
        [array[positions] for array in outputs],
    )


def whole(content_id: str, inputs: Mapping[str, Array], outputs: Sequence[Array]) -> RowSample | None:
    """Copy a run whose rows may influence each other; None if it is too large."""
    if sum(map(_bytes, (*inputs.values(), *outputs))) > BYTES_MAX:
        return None
    copied = {name: array.copy() for name, array in inputs.items()}
    return RowSample(
        content_id, len(outputs[0]) if outputs[0].ndim else 1, [0], copied, [array.copy() for array in outputs]
    )


def _bytes(array: Array) -> int:
    return array.nbytes if array.dtype != object else sum(map(len, array.reshape(-1).tolist()))


class Mismatch(Exception):
    """A row has other outputs in a batch than alone; the message says how."""


class Undecided(Exception):
    """The check ends without a result; the message says why."""


def compare(
    sample: RowSample, signature: Signature, run: Callable[[Mapping[str, Array]], Sequence[Array]]
) -> Iterator[None]:
    """Check a sample; yields after each run of the model. Raises Mismatch or Undecided, and Failure from `run`."""
    datatypes = [spec.datatype for spec in signature.outputs]
    scales = [column_scale(*pair) for pair in zip(datatypes, sample.outputs, strict=True)]
    flipped = 0
    for at, position in enumerate(sample.positions):
        row = {name: array[at : at + 1] for name, array in sample.inputs.items()}
        live = [array[at : at + 1] for array in sample.outputs]
        alone = list(run(row))
        yield
        if _differing(datatypes, live, alone, scales) is None:
            continue
        if _differing(datatypes, list(run(row)), alone, scales, REPEATED) is not None:
            raise Undecided("the same row alone gives other outputs the second time")
        yield
        filled = run({name: np.repeat(array, sample.rows, axis=0) for name, array in row.items()})
        same = [array[position : position + 1] for array in filled]
        yield
        output = _differing(datatypes, live, same, scales, REPEATED)
        if output is not None:
            raise Mismatch(_describe(signature, output, "depends on the other rows of its batch"))
        output = _differing(datatypes, live, alone, scales, dict.fromkeys(FLOATS, LOOSE), floats=True)
        if output is not None:
            raise Mismatch(_describe(signature, output, "depends on how many rows run with it"))
        output = _differing(datatypes, live, alone, scales, floats=False)
        flipped += output is not None
        if output is not None and flipped > 1:  # a single row may have been on the edge between two values
            raise Mismatch(_describe(signature, output, "depends on how many rows run with it"))


def compare_form(
    sample: RowSample, form: Form, run: Callable[[Mapping[str, Array]], Sequence[Array]]
) -> Iterator[None]:
    """Check the answers of a form; `run` runs the version's own file. Raises Mismatch or Failure."""
    if form.key != sample.form:
        raise Failure(Code.UNAVAILABLE, "another form serves now")
    try:
        expected = list(run(sample.inputs))
    except Failure as failure:
        if failure.code not in {Code.MODEL, Code.INVALID} or isinstance(failure, OutOfMemory):
            raise
        raise Mismatch(f"{sample.form} answers what the version's own file refuses: {failure.message}") from failure
    yield
    if why := form.difference(expected, sample.outputs):
        raise Mismatch(f"{sample.form} gave another answer to a live batch of {sample.rows} rows: {why}")


def _describe(signature: Signature, output: int, how: str) -> str:
    return f"a row of output '{signature.outputs[output].name}' {how}"


def _differing(
    datatypes: Sequence[str],
    actual: Sequence[Array],
    expected: Sequence[Array],
    scales: Sequence[Array],
    relative: Mapping[str, float] | None = None,
    *,
    floats: bool | None = None,
) -> int | None:
    """Return the index of the first output that does not agree, or None.

    `floats` restricts the comparison to floating-point outputs (True) or to the others (False).
    """
    for i, datatype in enumerate(datatypes):
        if floats is not None and (datatype in FLOATS) is not floats:
            continue
        tolerance = None if relative is None else relative.get(datatype)
        scale = scales[i] if expected[i].shape[1:] == scales[i].shape else None
        if disagreeing_rows(datatype, actual[i], expected[i], tolerance, scale):
            return i
    return None


class LiveCheck:
    """Samples shared runs and checks them row by row, one sample at a time. Called by the main loop only.

    Args:
        one_in: one in this many shared runs of a version is sampled, beginning with the first; 0 disables the check.
        settle: called with the manifest, the outcome and its reason at the end of a check.
    """

    def __init__(
        self,
        one_in: int,
        models: LoadedModels,
        run: Run,
        settle: Callable[[Manifest, Outcome, str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._one_in = one_in
        self._models = models
        self._run = run
        self._settle = settle
        self._clock = clock
        self._until_next: dict[str, int] = {}  # by content id: shared runs before the next sample
        self._undecided: set[str] = set()  # content ids of models that are not deterministic
        self._comparison: Iterator[None] | None = None
        self.sample: RowSample | None = None
        self._next_step = 0.0
        self._next_form = 0.0  # when the next run of a form may be sampled

    def overdue(self) -> bool:
        """Whether the next row of the sample should run although there is work."""
        return self._clock() >= self._next_step

    def due(self, content_id: str, model: LoadedModel) -> bool:
        """Count a shared run, or one of a compiled form; returns whether it is to be sampled."""
        if not self._one_in:
            return False
        if model.variant:  # a race compared rows
            return self.sample is None and self._clock() >= self._next_form
        if model.alone:
            return False
        left = self._until_next.get(content_id, 0)
        if left > 0:
            self._until_next[content_id] = left - 1
            return False
        if self.sample is not None or content_id in self._undecided:
            return False
        self._until_next[content_id] = self._one_in - 1
        return True

    def keep(self, model: LoadedModel, inputs: Mapping[str, Array], outputs: Sequence[Array]) -> None:
        """Copy some rows of a run, before its memory is reused."""
        if self.sample is not None or not outputs:
            return
        form = cast("Form", model.instance).form if model.variant else ""
        apart = model.manifest.signature.batching and not model.alone
        if (model.variant and not form) or (not form and len(outputs[0]) < 2):
            return
        try:
            sample = (sampled if apart else whole)(model.manifest.content_id, inputs, outputs)
        except MemoryError:
            return
        self.sample = None if sample is None else sample._replace(form=form)
        if self.sample is not None:
            self._comparison = None
            self._next_step = self._clock() + BUSY_STEP_S

    def step(self) -> None:
        """Run one row of the sample."""
        sample = self.sample
        if sample is None:
            return
        self._next_step = self._clock() + BUSY_STEP_S
        model = self._models.get(sample.content_id)
        form = bool(sample.form)
        if model is None or model.instance is None or bool(model.variant) != form or (model.alone and not form):
            self.sample = self._comparison = None
            return
        if self._comparison is None:
            self._comparison = self._compare_form(sample, model) if form else self._compare(sample, model)
        try:
            next(self._comparison)
        except StopIteration:
            self._end(model, Outcome.AGREES, "")
        except Mismatch as mismatch:
            if form:
                cast("Form", model.instance).fall_back(str(mismatch))
            self._end(model, Outcome.FORM_DIFFERS if form else Outcome.DIFFERS, str(mismatch))
        except Undecided as why:
            loaded = {content_id for content_id in self._undecided if self._models.get(content_id) is not None}
            self._undecided = loaded | {sample.content_id}
            self._end(model, Outcome.UNDECIDED, str(why))
        except (Failure, MemoryError, ValueError) as error:
            self._end(model, Outcome.UNDECIDED, str(error))

    def _compare(self, sample: RowSample, model: LoadedModel) -> Iterator[None]:
        return compare(sample, model.manifest.signature, lambda inputs: self._run(self._model_of(sample), inputs))

    def _compare_form(self, sample: RowSample, model: LoadedModel) -> Iterator[None]:
        form = cast("Form", model.instance)
        baseline = replace(model, instance=form.baseline)

        def run(inputs: Mapping[str, Array]) -> Sequence[Array]:
            began = self._clock()
            try:
                return self._run(baseline, inputs)
            finally:
                ended = self._clock()
                self._next_form = ended + max(BUSY_STEP_S, (ended - began) / FORMS_SHARE)

        return compare_form(sample, form, run)

    def _model_of(self, sample: RowSample) -> LoadedModel:
        model = self._models.get(sample.content_id)
        if model is None:
            raise Failure(Code.UNAVAILABLE, "the version was unloaded meanwhile")
        return model

    def _end(self, model: LoadedModel, outcome: Outcome, why: str) -> None:
        self.sample = self._comparison = None
        if len(self._until_next) > 2 * len(self._models.all()) + 16:
            models = self._models.all()
            self._until_next = {
                content_id: left for content_id, left in self._until_next.items() if content_id in models
            }
        self._settle(model.manifest, outcome, why)


class BatchingOff:
    """Turns batching off: in this worker at once, in other workers and in gateways through the version's verdict."""

    def __init__(self, repository: FolderRepository, models: LoadedModels, metrics: WorkerMetrics) -> None:
        self._repository = repository
        self._models = models
        self._metrics = metrics

    def settle(self, manifest: Manifest, outcome: Outcome, why: str) -> None:
        """Handle the outcome of a check; `why` describes the difference, or why there is no decision."""
        self._metrics.batch_checked(manifest, outcome)
        if outcome is Outcome.FORM_DIFFERS:
            log.error("version %s of %s: %s; the form serves no longer", manifest.version, manifest.model, why)
        if outcome is Outcome.UNDECIDED:
            log.info("a batch of %s was not checked: %s", manifest.content_id, why)
        if outcome is not Outcome.DIFFERS:
            return
        reason = f"rows of a live batch gave other outputs than they give alone: {why}"
        log.error(
            "version %s of %s: %s; its requests run one at a time from now on", manifest.version, manifest.model, reason
        )
        self._models.run_alone(manifest.content_id, reason)

        def turn_off(verdict: Verdict) -> Verdict:
            counted = verdict.model_copy(update={"mismatches": verdict.mismatches + 1})
            return counted if verdict.batching_off else counted.with_batching_off(reason, time.time())  # noqa: TID251 - for people

        try:
            self._repository.verdicts.change(manifest, turn_off)
        except Failure as failure:
            log.error("other workers still batch %s: %s", manifest.content_id, failure.message)  # noqa: TRY400
