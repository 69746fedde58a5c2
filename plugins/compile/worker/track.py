"""The track of a race on this machine: compiles candidates, and runs them beside the baseline, each in a process.

At most the baseline and two candidates are loaded at once. The process that was used least recently ends first.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

from millstream.plugins.compile.candidate import Candidate, Compiled, Subject
from millstream.plugins.compile.compile_runner import compile_candidate
from millstream.plugins.compile.compile_task import MEMORY_BYTES_DEFAULT, CompileTask
from millstream.plugins.compile.race.bounds import Extreme, Guard, extremes, finite, is_inside, narrowed
from millstream.plugins.compile.race.gate import Judgement, differing, influenced, judge
from millstream.plugins.compile.race.race import LateError, LostError, Prepared
from millstream.plugins.compile.race.report import STDERR_CHARACTERS_MAX, RaceEvent, RaceTask
from millstream.plugins.compile.race.statistics import Round, ratio_of
from millstream.plugins.compile.worker.compiled_cache import CompiledCache
from millstream.plugins.compile.worker.measuring import FailedError, Measuring
from millstream.plugins.compile.worker.messages import Answer, Opening
from millstream.plugins.compile.worker.outputs import read_outputs
from millstream.plugins.compile.worker.sample_files import SampleFiles
from millstream.services.model.samples import read_inputs
from millstream.services.repository.footprints import file_bytes
from millstream.workers.backends.base import Array

PROCESSES_MAX = 3  # the baseline's included
BLOCK_S = 0.03  # of one of the four blocks of a round; a run that takes longer is a block of its own
#: A candidate is lost if it takes so many times as long as the baseline, and a time for what does not depend on it.
SLOWER_MAX = 10.0
LOAD_S = 20.0  # of a load: the import of a library
BASELINE_FAILURES_MAX = 3  # of runs that succeeded before, as when the machine is short of memory
EXTREMES_SHARE = 0.1  # of the budget, for the baseline's answers to extremes
EXTREME_DEATHS_MAX = 2  # of the baseline's process with an extreme; then no more are tried
SLOW_S = 5.0  # of a block, or of the answers that are judged
#: Bytes that a compilation may write: libraries and calibration, then copies of the version's files.
WRITTEN_BYTES, WRITTEN_RATIO = 512 << 20, 16

_NOT_LOADED = "the version was not loaded within {:g} s: race when the machine is less busy (--race-seconds)"
_NOT_ANSWERED = "the version did not answer the samples in the budget of {:g} s: allow more seconds (--race-seconds)"
_TOO_SLOW = "the version is too slow for the budget: a run of {} rows takes more than {:g} s (--race-seconds)"


class _Answered(NamedTuple):
    """What the baseline answers to an extreme in a batch of `rows`."""

    extreme: Extreme
    rows: int
    outputs: list[Array]


class BaselineError(Exception):
    """The version as it is served today cannot be measured."""


class UnfinishedError(Exception):
    """The budget ended before a verdict: the version is too slow for it, or the machine is busy."""


class ProcessTrack:
    """Implements `race.Track` with processes.

    Args:
        subject: what is compiled.
        folder: for unfinished work.
        deadline: on the monotonic clock, when the budget ends.
        tell: reports progress.
    """

    def __init__(
        self,
        task: RaceTask,
        subject: Subject,
        folder: Path,
        deadline: float,
        tell: Callable[[RaceEvent], None],
    ) -> None:
        self._task = task
        self._subject = subject
        self._folder = folder
        self._timed = folder
        self._measured = folder / "measured"  # which measuring processes may write to
        self._measured.mkdir(exist_ok=True)
        self._deadline = deadline
        self.tell = tell
        self._compiled: dict[str, tuple[Compiled, Path]] = {}
        self._lossy: set[str] = set()
        self._processes: dict[str, Measuring] = {}  # of candidates, the one used last at the end
        self._baseline: Measuring | None = None
        self.baseline_runs_s: dict[int, float] = {}  # batch size -> seconds of a run of the baseline
        self._expected: list[list[Array]] = []
        self._extremes: list[_Answered] = []  # what the baseline accepts
        self._extremes_tried = False  # all of them
        self._extremes_s = 0.0
        self._baseline_failures = 0
        self._load_s = self._answers_s = 0.0  # of the baseline

    def now(self) -> float:
        return time.monotonic()

    def open_baseline(self, timed: Path) -> None:
        """Load the version as it is served. Raises BaselineError, UnfinishedError.

        Args:
            timed: the samples that are measured.
        """
        if self._baseline is not None:
            self._baseline.close()
        self._timed = timed
        began = time.monotonic()
        try:
            self._baseline = Measuring(self._opening(), self._left_s())
            self._load_s = time.monotonic() - began
        except FailedError as error:
            raise BaselineError(f"the version cannot be loaded: {error}") from None
        except TimeoutError:
            raise UnfinishedError(_NOT_LOADED.format(self._task.seconds)) from None

    def answers_s(self, calls: Sequence[Path], rows: int) -> float | None:
        """Return the seconds of all these samples, `rows` at a time; None: the version does not run with them.

        Raises BaselineError if it cannot be loaded, UnfinishedError if it takes longer than the budget.
        """
        self.open_baseline(calls[0])
        assert self._baseline is not None
        began = time.monotonic()
        try:
            for path in calls:
                self._answers(self._baseline, path, rows, self._left_s())
        except TimeoutError:
            raise UnfinishedError(_TOO_SLOW.format(rows, self._task.seconds)) from None
        except (FailedError, OSError, ValueError):
            return None
        return time.monotonic() - began

    def baseline_s(self, rows: int) -> float:
        """Return the seconds of a run of the baseline. Raises BaselineError, UnfinishedError."""
        try:
            self.baseline_runs_s[rows] = statistics.median(self._of_baseline(rows, self._left_s()))
        except TimeoutError:
            raise UnfinishedError(_TOO_SLOW.format(rows, self._task.seconds)) from None
        return self.baseline_runs_s[rows]

    def use(self, files: SampleFiles, cache: CompiledCache) -> bool:
        """Race with these samples, which the baseline answers first, and this cache. Raises BaselineError,
        UnfinishedError.

        Returns whether the baseline answers the same inputs equally, as far as the gate can tell.
        """
        self._files, self._cache = files, cache
        self.open_baseline(files.timed)
        assert self._baseline is not None
        began = time.monotonic()
        try:
            self._expected = [
                self._answers(self._baseline, path, files.batch_rows, self._left_s()) for path in files.judged
            ]
            self._answers_s = time.monotonic() - began
            again = self._answers(self._baseline, files.judged[0], files.batch_rows, self._left_s())
        except FailedError as error:
            raise BaselineError(f"the version fails with these samples: {error}") from None
        except TimeoutError:
            raise UnfinishedError(_NOT_ANSWERED.format(self._task.seconds)) from None
        self._answer_extremes()
        return not self._judgement(self._expected[0], again).why

    def _answer_extremes(self) -> None:
        """Have the baseline answer inputs that no sample has; those that it refuses are left out."""
        began, deaths = time.monotonic(), 0
        for extreme in extremes(self._task.manifest.signature):
            for rows in self._files.sizes:
                left_s = began + EXTREMES_SHARE * self._task.seconds - time.monotonic()
                if left_s <= 0 or deaths > EXTREME_DEATHS_MAX:
                    return
                try:
                    if self._baseline is None:
                        self.open_baseline(self._timed)
                    assert self._baseline is not None
                    outputs = self._answers(self._baseline, self._files.judged[0], rows, left_s, extreme)
                    self._extremes.append(_Answered(extreme, rows, outputs))
                except (FailedError, TimeoutError, OSError, ValueError):
                    if self._baseline is not None and self._baseline.ended:
                        self._baseline, deaths = None, deaths + 1
        self._extremes_tried = True
        self._extremes_s = time.monotonic() - began

    def close(self) -> None:
        """End all processes."""
        for process in [*self._processes.values(), *([self._baseline] if self._baseline is not None else [])]:
            process.close()
        self._processes.clear()
        self._baseline = None

    def compile(self, candidate: Candidate, seconds_max: float) -> Prepared:
        try:
            prepared = self._cache.find(candidate) or self._compile(candidate, seconds_max)
        except OSError as error:
            raise LostError(f"its files cannot be written: {error.strerror}") from None
        folder = self._cache.root / prepared.folder
        self._compiled[candidate.key] = prepared.compiled, folder
        if candidate.lossy:
            self._lossy.add(candidate.key)
        return prepared

    def _compile(self, candidate: Candidate, seconds_max: float) -> Prepared:
        self._close_but(0)
        folder = self._folder / candidate.key
        folder.mkdir()
        try:
            task = CompileTask(
                subject=self._subject,
                candidate=candidate,
                folder=folder,
                samples=self._files.calibration,
                seconds_max=seconds_max,
                memory_bytes=self._task.memory_bytes * (PROCESSES_MAX - 1) or MEMORY_BYTES_DEFAULT,
                share=self._task.share,
                written_bytes=WRITTEN_BYTES + WRITTEN_RATIO * file_bytes(self._task.manifest),
            )
            outcome = compile_candidate(task)
            if outcome.late:
                raise LateError(outcome.seconds)
            if outcome.compiled is None:
                raise LostError(outcome.error, outcome.stderr[-STDERR_CHARACTERS_MAX:])
            return self._cache.keep(candidate, folder, outcome)
        finally:
            rmtree(folder, ignore_errors=True)

    def judge(self, key: str, seconds_max: float) -> tuple[Judgement, bool]:
        deadline = time.monotonic() + seconds_max
        process = self._process(key, deadline)
        left_s = deadline - time.monotonic()
        slow_s = SLOW_S + SLOWER_MAX * (2 * self._answers_s + self._extremes_s)  # rows are run alone, too
        try:
            return self._judged(key, process, time.monotonic() + min(left_s, slow_s))
        except FailedError as error:
            raise self._lost(key, str(error)) from None
        except TimeoutError:
            if left_s < slow_s:
                self._close(key)
                raise
            why = f"it did not answer the samples within {slow_s:.1f} s; the baseline takes {self._answers_s:.3g} s"
            raise self._lost(key, why) from None
        except (OSError, ValueError) as error:
            raise self._lost(key, f"its outputs cannot be read: {error}") from None

    def _judged(self, key: str, process: Measuring, deadline: float) -> tuple[Judgement, bool]:
        signature, rows = self._task.manifest.signature, self._files.batch_rows
        batches = signature.batching and rows > 1
        single = batches and (not self._compiled[key][0].rows_independent or self._influenced(process, deadline))
        worst: Judgement | None = None
        for path, expected in zip(self._files.judged, self._expected, strict=True):
            actual = self._answers(process, path, 1 if single else rows, deadline - time.monotonic())
            judgement = self._judgement(expected, actual)
            if judgement.why:
                return judgement, single
            if worst is None or (judgement.cosine_min or 0.0) < (worst.cosine_min or 0.0):
                worst = judgement
        assert worst is not None
        judged = self._alone(process, worst, deadline) if batches and not single else worst
        return judged if judged.why else self._bounded(key, process, judged, single, deadline), single

    def _bounded(self, key: str, process: Measuring, judged: Judgement, single: bool, deadline: float) -> Judgement:
        """Return the judgement with the widest bounds in which the candidate answers extremes as the baseline does.

        Those that it was proven in; with finite numbers alone; with floats as in the samples; with all numbers as in
        the samples. Lossy candidates are calibrated for the samples, and are asked for no other floats.
        """
        signature, lossy = self._task.manifest.signature, key in self._lossy
        proven, (floats, numbers) = self._compiled[key][0].bounds, self._files.ranges
        options = [proven, narrowed(proven, finite(signature)), narrowed(proven, floats), narrowed(proven, numbers)]
        options = options[2:] if lossy else options
        options = options if self._extremes_tried else options[-1:]
        failing: list[tuple[Extreme, str]] = []
        for extreme, rows, expected in self._extremes:
            asked = extreme.name not in floats if lossy else is_inside(proven, extreme)
            if not asked or not is_inside(options[0], extreme) or (single and rows > 1):
                continue
            try:
                actual = self._answers(process, self._files.judged[0], rows, deadline - time.monotonic(), extreme)
                why = differing(signature, expected, actual, self._task.gate, lossy=lossy)
            except FailedError as error:
                if process.ended:
                    raise self._lost(key, f"with {extreme}, {error}") from None
                why = str(error)
            if why:
                failing.append((extreme, f"with {extreme}, in a batch of {rows}: {why}"))
        bounds, inside = options[0], failing
        for bounds in options:
            inside = [one for one in failing if is_inside(bounds, one[0])]
            if not inside:
                break
        else:
            return judged._replace(why=inside[0][1])
        if not Guard(bounds, signature).admits(read_inputs(self._files.judged[0], signature)):
            return judged._replace(why="the samples have larger integers than its library computes with exactly")
        return judged._replace(bounds=bounds)

    def _judgement(self, expected: Sequence[Array], actual: Sequence[Array]) -> Judgement:
        manifest = self._task.manifest
        embeddings = manifest.imported.embeddings if manifest.imported is not None else ()
        return judge(manifest.signature, expected, actual, self._task.gate, embeddings)

    def _influenced(self, process: Measuring, deadline: float) -> bool:
        once, again = self._files.neighbours
        rows = self._files.batch_rows
        outputs = [self._answers(process, path, rows, deadline - time.monotonic()) for path in (once, again)]
        return bool(influenced(self._task.manifest.signature, *outputs))

    def _alone(self, process: Measuring, judgement: Judgement, deadline: float) -> Judgement:
        """Return the judgement of some rows alone, if that is worse."""
        actual = self._answers(process, self._files.alone, 1, deadline - time.monotonic())
        expected = [array[: len(actual[0])] for array in self._expected[0]]
        alone = self._judgement(expected, actual)
        return alone._replace(why=f"alone, {alone.why}") if alone.why else judgement

    def round(self, key: str, sizes: Sequence[int], seconds_max: float) -> Round:
        deadline = time.monotonic() + seconds_max
        self._process(key, deadline)
        return {rows: self._ratio(key, rows, deadline) for rows in sizes}

    def _ratio(self, key: str, rows: int, deadline: float) -> float:
        """Measure A B B A."""
        first = statistics.median(self._of_baseline(rows, deadline - time.monotonic()))
        candidate = [self._block(key, rows, first, deadline) for _ in range(2)]
        last = statistics.median(self._of_baseline(rows, deadline - time.monotonic()))
        return ratio_of((first, last), candidate)

    def _block(self, key: str, rows: int, baseline_s: float, deadline: float) -> float:
        """Return the median seconds of a run of the candidate."""
        left_s = deadline - time.monotonic()
        slow_s = SLOW_S + SLOWER_MAX * max(BLOCK_S, baseline_s)
        try:
            return statistics.median(self._processes[key].times(rows, BLOCK_S, min(left_s, slow_s)))
        except FailedError as error:
            raise self._lost(key, str(error)) from None
        except TimeoutError:
            if left_s < slow_s:
                self._close(key)
                raise
            why = f"a run of {rows} rows did not end within {slow_s:.1f} s; the baseline takes {baseline_s:.3g} s"
            raise self._lost(key, why) from None

    def _of_baseline(self, rows: int, seconds_max: float) -> tuple[float, ...]:
        if self._baseline is None:
            self.open_baseline(self._timed)
        assert self._baseline is not None
        try:
            return self._baseline.times(rows, BLOCK_S, seconds_max)
        except FailedError as error:
            self._baseline.close()
            self._baseline = None
            self._baseline_failures += 1
            if self._baseline_failures > BASELINE_FAILURES_MAX or rows not in self.baseline_runs_s:
                raise BaselineError(f"the version fails with {rows} rows: {error}") from None
            raise TimeoutError from None  # the round does not count; the next one loads it again
        except TimeoutError:
            self._baseline = None  # it was killed; the next round loads it again
            raise

    def _process(self, key: str, deadline: float) -> Measuring:
        """Return the candidate's process, which is started if it is not there. Raises LostError, TimeoutError."""
        process = self._processes.pop(key, None)
        if process is None:
            self._close_but(PROCESSES_MAX - 2)
            process = self._start(key, deadline)
        self._processes[key] = process
        return process

    def _start(self, key: str, deadline: float) -> Measuring:
        compiled, folder = self._compiled[key]
        left_s, slow_s = deadline - time.monotonic(), LOAD_S + SLOWER_MAX * self._load_s
        try:
            return Measuring(self._opening(compiled, folder), min(left_s, slow_s))
        except FailedError as error:
            raise LostError(f"it cannot be loaded: {error}", error.stderr) from None
        except TimeoutError:
            if left_s < slow_s:
                raise
            raise LostError(
                f"it was not loaded within {slow_s:.1f} s; the baseline takes {self._load_s:.2g} s"
            ) from None
        except OSError as error:
            raise LostError(f"its process cannot be started: {error.strerror}") from None

    def _opening(self, compiled: Compiled | None = None, folder: Path | None = None) -> Opening:
        task, path = self._task, self._subject.path
        if compiled is not None and folder is not None and compiled.files:
            path = folder / compiled.files[0]
        return Opening(
            backend=compiled.backend if compiled is not None else task.backend,
            path=path,
            signature=task.manifest.signature,
            device=task.device,
            threads=task.threads,
            inputs=self._timed,
            folder=self._measured,
            options=compiled.options if compiled is not None else {},
            memory_bytes=task.memory_bytes,
        )

    def _answers(
        self, process: Measuring, path: Path, rows: int, seconds_max: float, extreme: Extreme | None = None
    ) -> list[Array]:
        to = self._measured / "outputs.npz"
        try:
            process.answer(Answer(inputs=path, rows=rows, to=to, extreme=extreme), seconds_max)
            return read_outputs(to)
        finally:
            to.unlink(missing_ok=True)

    def _close_but(self, kept: int) -> None:
        """Close candidates until `kept` are left."""
        while len(self._processes) > kept:
            self._close(next(iter(self._processes)))

    def _lost(self, key: str, why: str) -> LostError:
        process = self._processes.get(key)
        self._close(key)
        return LostError(why, process.stderr if process is not None else "")

    def _close(self, key: str) -> None:
        process = self._processes.pop(key, None)
        if process is not None:
            process.close()

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())
