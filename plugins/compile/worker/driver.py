"""The driver of a race: samples and baseline, then one candidate after the other, then the report.

task ─> inputs that run ─> candidates ─> each: compile, judge, measure (A B B A) ─> the fastest that is right
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from millstream.plugins.compile.candidate import Candidate, Subject
from millstream.plugins.compile.race.report import (
    BASELINE,
    CANDIDATES_MAX,
    SIZES,
    Origin,
    RaceEvent,
    RaceReport,
    RaceTask,
    Row,
)
from millstream.plugins.compile.race.samples import (
    INTEGERS_MAX,
    RANDOM_ROWS,
    SampleFiles,
    Split,
    draw,
    split,
    write_files,
    write_samples,
    write_timed,
)
from millstream.plugins.compile.targets import TARGETS, target_of
from millstream.plugins.compile.targets.base import Target
from millstream.plugins.compile.worker.compiled_cache import CompiledCache, libraries, working
from millstream.plugins.compile.worker.track import BaselineError, LostError, Track
from millstream.services.device import find_device
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.agreement import Array
from millstream.services.model.samples import read_inputs
from millstream.services.model.warmup_inputs import VARIABLE_SIZES, has_variable_dims, make_inputs
from millstream.services.repository.disk import storage_failure

IMPORT_SAMPLES = "imported/samples.npz"  # below the version's folder: what its source framework answered
JUDGED_ROWS_MAX, JUDGED_ROWS_MIN = 256, 16
JUDGED_S = 2.5  # of the baseline's answers: fewer rows of a slow version are judged
DRAWN_S = 6.0  # in which drawn rows are tried
PROBE_ROWS = 2  # tried one by one, to see how long a row takes
_RANDOM_CALLS = 4  # that a version without batching is judged by
ROUNDS = 10  # of each candidate
ROUNDS_MIN = 3  # after which one that is clearly slower than the best, or the baseline, is measured no more
SLOWER = 0.8
GAIN_MIN = 1.05  # times as fast as the baseline, and a lossy one as the best that is not
ROUNDS_WON = 0.8  # of the rounds, in which the winner was faster: a median alone may be chance
_RANDOM = "the samples are RANDOM, drawn from the signature: accuracy on real inputs may differ: give the race samples"
_UNSTEADY = "the version answers the same inputs differently from run to run, so that no candidate can pass the gate"


class Inputs(NamedTuple):
    """Inputs that the version runs with."""

    samples: Split
    origin: Origin
    notes: tuple[str, ...]


def run_race(task: RaceTask, tell: Callable[[RaceEvent], None]) -> RaceReport:
    """Race, and return the report.

    Raises Failure if no race can take place, with what to change; LateError if the machine is too busy for one.
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
    subject = Subject(
        path=(task.folder / manifest.served).absolute(),
        source_format=manifest.source_format,
        signature=manifest.signature,
        rows_max=manifest.config.rows_max,
        threads=task.threads,
        device=task.device,
    )
    tell(RaceEvent(stage="starting"))
    track = Track(task, subject, folder)
    try:
        sizes = _sizes(task)
        inputs = _inputs(task, track, folder, max(sizes))
        baseline_s = {rows: track.baseline_s(rows) for rows in sizes}
        files = _files(task, folder, inputs, baseline_s)
        steady = track.use(files, CompiledCache(task, files.digest))
        lossy = None if inputs.origin != "random" or task.accept_random_samples else task.serving
        candidates, others = _candidates(subject, targets, _named(task), lossy)
        candidates.sort(key=lambda one: one.key not in task.serving)  # what serves is not skipped for time
        rows = _Entries(task, track, sizes, began, tell).run(candidates)
    finally:
        track.close()
    winner, why = _winner(rows)
    return RaceReport(
        model=manifest.model,
        version=manifest.version,
        baseline=f"{task.backend}, {task.threads} thread{'s' if task.threads > 1 else ''}, as it is served",
        winner=winner.candidate if winner is not None else None,
        why=why,
        ratio=(winner.ratio or 1.0) if winner is not None else 1.0,
        table={size: winner.candidate if size in winner.ratios else BASELINE for size in sizes} if winner else {},
        rows=(*sorted(rows, key=lambda row: (row.verdict != "won", -(row.ratio or 0.0), row.candidate)), *others),
        baseline_s=baseline_s,
        seconds=round(time.monotonic() - began, 3),
        samples=inputs.origin,
        device=task.device,
        fingerprint=find_device(task.device).fingerprint,
        runtimes=libraries(),
        seed=task.seed,
        notes=(*inputs.notes, *(() if steady else (_UNSTEADY,))),
    )


class _Entries:
    """Compiles, judges and measures candidates, one after the other. A candidate that is lost hurts itself alone."""

    def __init__(
        self, task: RaceTask, track: Track, sizes: Sequence[int], began: float, tell: Callable[[RaceEvent], None]
    ) -> None:
        self._task = task
        self._track = track
        self._sizes = sizes
        self._began = began
        self._tell_ = tell
        self._rows: list[Row] = []
        self._total = 0

    def run(self, candidates: Sequence[Candidate]) -> list[Row]:
        self._total = len(candidates)
        for candidate in candidates:
            row = Row(
                target=candidate.target,
                candidate=candidate.key,
                flags=candidate.flags,
                lossy=candidate.lossy,
                verdict="skipped",
                why=f"the race took {self._task.seconds_max:g} s: name targets (--targets)",
            )
            if time.monotonic() - self._began < self._task.seconds_max:
                row = self._entered(candidate, row)
            self._rows.append(row)
        return self._rows

    def _entered(self, candidate: Candidate, row: Row) -> Row:
        key = candidate.key
        try:
            self._tell("compiling", key)
            prepared = self._track.compile(candidate)
            row = row.model_copy(update={**prepared._asdict(), "verdict": "lost", "why": ""})
            self._tell("judging", key)
            judgement, single = self._track.judge()
            judged = {"outputs": judgement.outputs, "single": single, "bounds": judgement.bounds}
            judged |= {"cosine_min": judgement.cosine_min, "agreement_min": judgement.agreement_min}
            row = row.model_copy(update=judged)
            if judgement.why:
                return row.model_copy(update={"verdict": "inaccurate", "why": judgement.why, "compiled": None})
            return self._measured(row)
        except LostError as lost:
            stderr = lost.stderr or row.stderr
            return row.model_copy(update={"verdict": "failed", "why": lost.why, "stderr": stderr, "compiled": None})
        finally:
            self._track.close_candidate()

    def _measured(self, row: Row) -> Row:
        """Return a row with its ratios, and why it cannot win; "" if it may."""
        sizes = [1] if row.single else self._sizes
        best = max((one.ratio or 0.0 for one in self._rows if one.verdict == "lost" and not one.lossy), default=1.0)
        rounds: list[dict[int, float]] = []
        while len(rounds) < ROUNDS:
            rounds.append(self._track.round(sizes))
            self._tell("measuring", row.candidate, _mean(rounds[-1], self._sizes))
            ratio = statistics.median(_mean(one, self._sizes) for one in rounds)
            if len(rounds) >= ROUNDS_MIN and ratio < SLOWER * max(best, 1.0):
                break
        won = sum(_mean(one, self._sizes) > 1 for one in rounds) >= ROUNDS_WON * len(rounds)
        why = f"slower than others after {len(rounds)} rounds" if len(rounds) < ROUNDS else ""
        if not why and (ratio < GAIN_MIN or not won):
            why = "gains less than 5 %"
        ratios = {size: statistics.median(one[size] for one in rounds) for size in sizes}
        return row.model_copy(update={"rounds": len(rounds), "ratio": ratio, "ratios": ratios, "why": why})

    def _tell(self, stage: str, key: str, ratio: float | None = None) -> None:
        ratios = {row.candidate: round(row.ratio, 3) for row in self._rows if row.ratio is not None}
        ratios |= {key: round(ratio, 3)} if ratio is not None else {}
        self._tell_(
            RaceEvent(
                stage=stage,
                candidate=key,
                done=len(self._rows),
                total=self._total,
                ratios=ratios,
                seconds=round(time.monotonic() - self._began, 3),
            )
        )


def _mean(ratios: Mapping[int, float], sizes: Sequence[int]) -> float:
    """Return the geometric mean over all batch sizes; the baseline runs those without a ratio."""
    return math.exp(sum(math.log(ratios.get(size, 1.0)) for size in sizes) / len(sizes))


def _winner(rows: list[Row]) -> tuple[Row | None, str]:
    """Return the fastest row that gains enough, whose verdict is changed in place, and why it wins or none does."""
    measured = sorted((row for row in rows if row.ratio is not None), key=lambda row: -(row.ratio or 0.0))
    able = [row for row in measured if not row.why]
    if not able:
        fastest = f"the fastest, {measured[0].candidate}, is {measured[0].ratio:.2f} times as fast" if measured else ""
        return None, fastest or "no candidate passed the gate"
    winner = able[0]
    exact = next((row for row in able if not row.lossy), None)
    if exact is not None and (winner.ratio or 0.0) < (exact.ratio or 0.0) * GAIN_MIN:
        winner = exact
    served = "single rows" if winner.single else "batches of all sizes"
    for at, row in enumerate(rows):
        if row is winner:
            winner = rows[at] = row.model_copy(update={"verdict": "won", "why": f"serves {served}"})
        elif row in able:
            rows[at] = row.model_copy(update={"why": f"gains less than {winner.candidate}"})
    return winner, f"it is {winner.ratio:.2f} times as fast"


def _sizes(task: RaceTask) -> tuple[int, ...]:
    """Return the batch sizes that are measured."""
    if not task.manifest.signature.batching:
        return (1,)
    return tuple(sorted({min(rows, task.manifest.config.rows_max) for rows in SIZES}))


def _inputs(task: RaceTask, track: Track, folder: Path, rows: int) -> Inputs:
    """Return inputs that the baseline runs with. Raises Failure(INVALID), BaselineError, LateError."""
    signature = task.manifest.signature
    path, found = task.samples, "uploaded"
    if path is None and (imported := task.folder / IMPORT_SAMPLES).is_file():
        path, found = imported, "import"
    if path is not None:
        given = split(read_inputs(path, signature), signature, JUDGED_ROWS_MAX)
        write_timed(folder, given.judged[0], signature, rows)
        track.open_baseline(folder / "timed.npz")
        notes = () if given.disjoint else ("calibration and judged samples are the same: there is one sample alone",)
        return Inputs(given, "import" if found == "import" else "uploaded", notes)
    for size, integers_max in _tries(task):
        calls = _running(task, track, folder, _drawn(task, size, integers_max), rows)
        if calls:
            sizes = (f"variable dimensions are {size} in the random samples",) if has_variable_dims(signature) else ()
            drawn = split(calls[0], signature, JUDGED_ROWS_MAX)
            if not signature.batching:
                drawn = Split(calls[0], tuple(calls[1:]), disjoint=True)
            return Inputs(drawn, "random", (_RANDOM, *sizes))
    raise invalid("the version runs with none of the generated inputs: give the race samples")


def _running(
    task: RaceTask, track: Track, folder: Path, calls: Sequence[dict[str, Array]], rows: int
) -> list[dict[str, Array]]:
    """Return those of the drawn calls, or rows, that there is time to try; none if the version fails with them."""
    paths = [folder / f"drawn-{at}.npz" for at in range(len(calls))]
    if task.manifest.signature.batching:
        write_samples(paths[0], _first(calls[0], PROBE_ROWS))
        seconds = track.answers_s(paths, 1)
        if seconds is None:
            return []
        calls = [_first(calls[0], max(2 * PROBE_ROWS, int(PROBE_ROWS * DRAWN_S / seconds)))]
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


def _files(task: RaceTask, folder: Path, inputs: Inputs, baseline_s: Mapping[int, float]) -> SampleFiles:
    """Write the samples, as many judged ones as the baseline answers in a short time."""
    signature, samples = task.manifest.signature, inputs.samples
    if signature.batching:
        row_s = baseline_s[max(baseline_s)] / max(baseline_s)
        rows = max(JUDGED_ROWS_MIN, int(JUDGED_S / row_s))
        samples = samples._replace(judged=tuple(_first(call, rows) for call in samples.judged))
    return write_files(folder, signature, samples, list(baseline_s), task.manifest.config.rows_max)


def _first(call: Mapping[str, Array], rows: int) -> dict[str, Array]:
    return {name: array[:rows] for name, array in call.items()}


def _named(task: RaceTask) -> tuple[str, ...]:
    """Return the names of what takes part; empty: all does.

    What serves now does, too: a verdict on other candidates alone would end it.
    """
    return (*task.targets, *filter(_is_known, task.serving)) if task.targets else ()


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
    racing: dict[str, Candidate] = {}
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
                why = "it is lossy: give the race samples, or let it accept random ones"
            if why:
                row = Row(
                    target=one.target, candidate=one.key, flags=one.flags, lossy=one.lossy, verdict="skipped", why=why
                )
                rows.append(row)
            else:
                racing[one.key] = one
    return list(racing.values()), rows[:CANDIDATES_MAX]
