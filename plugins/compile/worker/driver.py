"""The driver of a race: samples and baseline, then the candidates, then the report.

task ─> inputs that run ─> batch sizes that the budget affords ─> candidates of the targets ─> Race on a ProcessTrack
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from millstream.plugins.compile.candidate import Candidate, Subject
from millstream.plugins.compile.race.choice import ROUNDS_MIN
from millstream.plugins.compile.race.estimate import Estimate, estimate_of
from millstream.plugins.compile.race.race import Race, Result
from millstream.plugins.compile.race.report import CANDIDATES_MAX, Origin, RaceEvent, RaceReport, RaceTask, Row
from millstream.plugins.compile.race.samples import INTEGERS_MAX, RANDOM_ROWS, Split, draw, split, write_samples
from millstream.plugins.compile.race.schedule import FINAL_SHARE, Budget
from millstream.plugins.compile.targets import TARGETS, target_of
from millstream.plugins.compile.targets.base import Target
from millstream.plugins.compile.worker.compiled_cache import CompiledCache, libraries, working
from millstream.plugins.compile.worker.sample_files import SampleFiles, write_files, write_timed
from millstream.plugins.compile.worker.track import BLOCK_S, BaselineError, ProcessTrack, UnfinishedError
from millstream.services.device import find_device
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.agreement import Array
from millstream.services.model.samples import read_inputs
from millstream.services.model.warmup_inputs import VARIABLE_SIZES, has_variable_dims, make_inputs
from millstream.services.repository.disk import storage_failure
from millstream.services.repository.footprints import file_bytes

IMPORT_SAMPLES = "imported/samples.npz"  # below the version's folder: what its source framework answered
JUDGED_ROWS_MAX = 256
JUDGED_SHARE = 0.02  # of the budget, for the baseline's answers
JUDGED_ROWS_MIN = 16
DRAWN_SHARE = 0.05  # of the budget, in which drawn rows are tried
PROBE_ROWS = 2  # tried one by one, to see how long a row takes
_RANDOM_CALLS = 4  # that a version without batching is judged by
_RANDOM = (
    "the samples are RANDOM, drawn from the signature: accuracy on real inputs may differ; send some with --samples"
)

_UNSTEADY = "the version answers the same inputs differently from run to run, so that no candidate can pass the gate"


class Inputs(NamedTuple):
    """Inputs that the version runs with."""

    samples: Split
    origin: Origin
    notes: tuple[str, ...]


def run_race(task: RaceTask, tell: Callable[[RaceEvent], None]) -> RaceReport:
    """Race, and return the report.

    Raises Failure if no race can take place, with what to change; UnfinishedError if no candidate found the time.
    """
    began = time.monotonic()
    targets = list({target.name: target for target in map(target_of, _named(task))}.values())
    try:
        with working(task.cache) as folder:
            return _run(task, folder, began, tell, targets or [one for one in TARGETS if not one.experimental])
    except BaselineError as error:
        raise Failure(Code.MODEL, str(error)) from None
    except OSError as error:
        raise storage_failure(error, task.cache) from error


def _run(
    task: RaceTask, folder: Path, began: float, tell: Callable[[RaceEvent], None], targets: Sequence[Target]
) -> RaceReport:
    manifest = task.manifest
    budget = Budget(began, task.seconds)
    subject = Subject(
        path=(task.folder / manifest.served).absolute(),
        source_format=manifest.source_format,
        signature=manifest.signature,
        rows_max=manifest.config.rows_max,
        threads=task.threads,
        device=task.device,
    )
    tell(RaceEvent(stage="starting"))
    track = ProcessTrack(task, subject, folder, began + task.seconds, tell)
    try:
        weights = _weights(task)
        inputs = _inputs(task, track, folder, max(weights))
        weights, dropped = _affordable(track, weights, budget)
        files = _files(task, track, folder, inputs, weights)
        cache = CompiledCache(task, files.digest)
        steady = track.use(files, cache)
        lossy = None if _allows_lossy(task, inputs) else task.serving
        candidates, others = _candidates(subject, targets, _named(task), lossy)
        estimates = _estimates(task, cache, candidates)
        result = Race(candidates, weights, budget, track, task.seed, estimates).run()
        if result.rows and all(row.verdict == "skipped" for row in result.rows):
            raise UnfinishedError(f"no candidate was measured: {result.rows[0].why}")
        _check_serving(task, result)
    finally:
        track.close()
    total = sum(weights.values())
    runtimes = sorted({row.compiled.runtime for row in result.rows if row.compiled is not None})
    return RaceReport(
        model=manifest.model,
        version=manifest.version,
        baseline=f"{task.backend}, {task.threads} thread{'s' if task.threads > 1 else ''}, as it is served",
        winner=result.choice.winner,
        why=result.choice.why,
        ratio=result.choice.ratio,
        table=result.choice.table,
        rows=(*result.rows, *others),
        weights={rows: weight / total for rows, weight in weights.items()},
        baseline_s={rows: track.baseline_runs_s[rows] for rows in weights},
        seconds=round(time.monotonic() - began, 3),
        seconds_max=task.seconds,
        samples=inputs.origin,
        device=task.device,
        fingerprint=find_device(task.device).fingerprint,
        model_bytes=file_bytes(manifest),
        runtimes=libraries() or dict.fromkeys(runtimes, ""),
        seed=task.seed,
        notes=(*inputs.notes, *dropped, *(() if steady else (_UNSTEADY,))),
    )


def _estimates(task: RaceTask, cache: CompiledCache, candidates: Sequence[Candidate]) -> dict[str, Estimate]:
    """Return the estimates of the task; candidates that are compiled already take no time."""
    compiled = {
        one.key: estimate_of(one, task.estimates).model_copy(update={"seconds": 0.0})
        for one in candidates
        if cache.has(one)
    }
    return {**task.estimates, **compiled}


def _weights(task: RaceTask) -> dict[int, float]:
    """Return batch size -> weight, with the sizes that the version runs."""
    if not task.manifest.signature.batching:
        return {1: 1.0}
    weights: dict[int, float] = {}
    for rows, weight in sorted(task.rows.items()):
        size = min(rows, task.manifest.config.rows_max)
        weights[size] = weights.get(size, 0.0) + weight
    return weights


def _inputs(task: RaceTask, track: ProcessTrack, folder: Path, rows: int) -> Inputs:
    """Return inputs that the baseline runs with. Raises Failure(INVALID), BaselineError."""
    signature = task.manifest.signature
    path = task.samples
    found: Origin = "uploaded"
    if path is None and (imported := task.folder / IMPORT_SAMPLES).is_file():
        path, found = imported, "import"
    if path is not None:
        given = split(read_inputs(path, signature), signature, JUDGED_ROWS_MAX)
        write_timed(folder, given.judged[0], signature, rows)
        track.open_baseline(folder / "timed.npz")
        notes = () if given.disjoint else ("calibration and judged samples are the same: there is one sample alone",)
        return Inputs(given, found, notes)
    for size, integers_max in _tries(task):
        calls = _running(task, track, folder, _drawn(task, size, integers_max), rows)
        if calls:
            sizes = (f"variable dimensions are {size} in the random samples",) if has_variable_dims(signature) else ()
            drawn = split(calls[0], signature, JUDGED_ROWS_MAX)
            if not signature.batching:
                drawn = Split(calls[0], tuple(calls[1:]), disjoint=True)
            return Inputs(drawn, "random", (_RANDOM, *sizes))
    raise invalid("the version runs with none of the generated inputs: send some with --samples")


def _running(
    task: RaceTask, track: ProcessTrack, folder: Path, calls: Sequence[dict[str, Array]], rows: int
) -> list[dict[str, Array]]:
    """Return those of the drawn calls, or rows, that the budget allows to try; none if the version fails with them."""
    paths = [folder / f"drawn-{at}.npz" for at in range(len(calls))]
    if task.manifest.signature.batching:
        write_samples(paths[0], _first(calls[0], PROBE_ROWS))
        seconds = track.answers_s(paths, 1)
        if seconds is None:
            return []
        affordable = int(PROBE_ROWS * task.seconds * DRAWN_SHARE / seconds)
        calls = [_first(calls[0], max(2 * PROBE_ROWS, affordable))]
    for path, call in zip(paths, calls, strict=True):
        write_samples(path, call)
    return list(calls) if track.answers_s(paths, rows) is not None else []


def _tries(task: RaceTask) -> Iterator[tuple[int, int]]:
    """Yield sizes of variable dimensions and upper bounds of integers; 0: the constants of the model check."""
    trial = task.manifest.trial
    sizes = [1] if not has_variable_dims(task.manifest.signature) else list(dict.fromkeys((32, *VARIABLE_SIZES)))
    if trial is not None and trial.size != 1:
        sizes = [trial.size]
    integers = any(spec.datatype.lstrip("U").startswith("INT") for spec in task.manifest.signature.inputs)
    for integers_max in (*(INTEGERS_MAX if integers else (1,)), 0):
        for size in sizes:
            yield size, integers_max


def _drawn(task: RaceTask, size: int, integers_max: int) -> list[dict[str, Array]]:
    """Return calls: one with many rows, or several of a version that does not batch."""
    signature = task.manifest.signature
    if not integers_max:
        fill = task.manifest.trial.fill if task.manifest.trial is not None else 1
        constant = make_inputs(signature, RANDOM_ROWS, size, fill)
        return [constant] if signature.batching else [constant, constant]
    if signature.batching:
        return [draw(signature, RANDOM_ROWS, task.seed, size, integers_max)]
    return [draw(signature, 1, task.seed + at, size, integers_max) for at in range(_RANDOM_CALLS + 1)]


def _affordable(
    track: ProcessTrack, weights: Mapping[int, float], budget: Budget
) -> tuple[dict[int, float], tuple[str, ...]]:
    """Return the sizes of which the budget affords enough rounds, and what to say of the others.

    Raises UnfinishedError if there is none.
    """
    kept: dict[int, float] = {}
    cost_s = 0.0
    for rows, weight in sorted(weights.items()):
        run_s = track.baseline_s(rows)
        cost_s += 4 * max(run_s, BLOCK_S) * ROUNDS_MIN
        if cost_s > budget.seconds * FINAL_SHARE:
            if not kept:
                needed = math.ceil(cost_s / FINAL_SHARE)
                raise UnfinishedError(
                    f"the version is too slow for the budget: a run of {rows} rows takes {run_s:.2g} s, so that a race "
                    f"takes {needed} s at least (--race-seconds {needed})"
                )
            larger = sorted(set(weights) - set(kept))
            return kept, (f"batches of {larger} rows are not measured: they take too long for the budget",)
        kept[rows] = weight
    return kept, ()


def _files(
    task: RaceTask, track: ProcessTrack, folder: Path, inputs: Inputs, weights: Mapping[int, float]
) -> SampleFiles:
    """Write the samples, as many judged ones as the baseline answers in a small share of the budget."""
    signature, samples = task.manifest.signature, inputs.samples
    if signature.batching:
        row_s = track.baseline_runs_s[max(weights)] / max(weights)
        rows = max(JUDGED_ROWS_MIN, int(task.seconds * JUDGED_SHARE / row_s))
        samples = samples._replace(judged=tuple(_first(call, rows) for call in samples.judged))
    return write_files(folder, signature, samples, list(weights), task.manifest.config.rows_max)


def _first(call: Mapping[str, Array], rows: int) -> dict[str, Array]:
    return {name: array[:rows] for name, array in call.items()}


def _allows_lossy(task: RaceTask, inputs: Inputs) -> bool:
    return inputs.origin != "random" or task.accept_random_samples


def _named(task: RaceTask) -> tuple[str, ...]:
    """Return the names of what takes part; empty: all does.

    What serves now does, too: a verdict on other candidates alone would end it.
    """
    return (*task.targets, *filter(_is_known, task.serving)) if task.targets else ()


def _check_serving(task: RaceTask, result: Result) -> None:
    """Raise UnfinishedError if what serves now found no time: a verdict without it would end it unbeaten."""
    for row in result.rows:
        few = row.verdict == "lost" and row.rounds < ROUNDS_MIN and result.choice.winner is None
        if row.candidate in task.serving and (row.verdict == "skipped" or few):
            raise UnfinishedError(f"{row.candidate}, which serves now, was not measured often enough: {row.why}")


def _is_known(name: str) -> bool:
    """Return whether this release has the target of a candidate."""
    try:
        target_of(name)
    except Failure:
        return False
    return True


def _candidates(
    subject: Subject, targets: Sequence[Target], names: Sequence[str] = (), lossy: Collection[str] | None = None
) -> tuple[list[Candidate], list[Row]]:
    """Return the candidates that race, and rows of targets and candidates that do not.

    Args:
        subject: the version.
        targets: that are looked at.
        names: of the targets and candidates that take part; empty: all do.
        lossy: keys of the lossy candidates that take part; None: all do.
    """
    racing: list[Candidate] = []
    rows: list[Row] = []
    for target in targets:
        try:
            missing = target.available(subject.device)
            found = [
                one
                for one in (target.candidates(subject) if missing is None else ())
                if not names or target.name in names or one.key in names
            ]
        except Exception as error:
            rows.append(Row(target=target.name, candidate=target.name, verdict="failed", why=f"{error}"))
            continue
        if missing is not None:
            why = f"{missing.why}; {missing.install}" if missing.install else missing.why
            rows.append(Row(target=target.name, candidate=target.name, verdict="unavailable", why=why))
        for one in found:
            why = "" if len(racing) < CANDIDATES_MAX else f"only {CANDIDATES_MAX} candidates race"
            if one.lossy and lossy is not None and one.key not in lossy:
                why = "it is lossy: send samples (--samples) or --accept-random-samples"
            if why:
                row = Row(
                    target=one.target, candidate=one.key, flags=one.flags, lossy=one.lossy, verdict="skipped", why=why
                )
                rows.append(row)
            else:
                racing.append(one)
    return racing, rows[:CANDIDATES_MAX]
