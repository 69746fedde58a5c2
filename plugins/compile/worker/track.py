"""The track of a race on this machine: compiles a candidate, and runs it beside the baseline, each in a process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

from millstream.plugins.compile.candidate import (
    MEMORY_BYTES_MAX,
    Bounds,
    Candidate,
    Compiled,
    CompileTask,
    Subject,
)
from millstream.plugins.compile.form_runner import Answer, Measuring, Opening, compile_candidate
from millstream.plugins.compile.race.bounds import Extreme, Guard, extremes, finite, is_inside, narrowed
from millstream.plugins.compile.race.gate import Judgement, differing, influenced, judge
from millstream.plugins.compile.race.report import RaceTask
from millstream.plugins.compile.race.samples import SampleFiles
from millstream.plugins.compile.worker.compiled_cache import CompiledCache, Prepared
from millstream.services.model.agreement import Array
from millstream.services.model.samples import read_inputs
from millstream.services.repository.footprints import file_bytes
from millstream.services.sandbox.child import ChildFailedError

BLOCK_S = 0.03  # of one of the four blocks of a round; a run that takes longer is a block of its own
COMPILE_S_MAX = 300.0  # of a candidate
BASELINE_S_MAX = 300.0  # for the baseline's load, a block of it, or its answers; beyond, there is no race
#: A candidate is lost if it takes so many times as long as the baseline, and a time for what does not depend on it.
SLOWER_MAX = 10.0
LOAD_S = 20.0  # of a load: the import of a library
SLOW_S = 5.0  # of a block, or of the answers that are judged
BASELINE_FAILURES_MAX = 3  # of runs that succeeded before, as when the machine is short of memory
EXTREMES_S = 12.0  # for the baseline's answers to extremes
EXTREME_DEATHS_MAX = 2  # of the baseline's process with an extreme; then no more are tried
#: Bytes that a compilation may write: libraries and calibration, then copies of the version's files.
WRITTEN_BYTES, WRITTEN_RATIO = 512 << 20, 16


class LostError(Exception):
    """A candidate is out of the race: it crashed, hung, needed too much memory or cannot be compiled."""

    def __init__(self, why: str, stderr: str = "") -> None:
        super().__init__(why)
        self.why = why
        self.stderr = stderr


class BaselineError(Exception):
    """The version as it is served today cannot be measured."""


class LateError(Exception):
    """The version takes too long to be raced: it is too slow, or the machine is busy."""


class _Answered(NamedTuple):
    """What the baseline answers to an extreme in a batch of `rows`."""

    extreme: Extreme
    rows: int
    outputs: list[Array]


class Track:
    """Runs the baseline and one candidate at a time.

    Args:
        subject: what is compiled.
        folder: for unfinished work.
    """

    def __init__(self, task: RaceTask, subject: Subject, folder: Path) -> None:
        self._task = task
        self._signature = task.manifest.signature
        self._subject = subject
        self._folder = folder
        self._timed = folder
        self._measured = folder / "measured"  # which measuring processes may write to
        self._measured.mkdir(exist_ok=True)
        self._candidate: Candidate | None = None
        self._compiled: tuple[Compiled, Path] | None = None  # of the candidate
        self._process: Measuring | None = None  # of the candidate
        self._baseline: Measuring | None = None
        self._expected: list[list[Array]] = []
        self._extremes: list[_Answered] = []  # what the baseline accepts
        self._extremes_tried = False  # all of them
        self._baseline_failures = 0
        self._load_s = self._answers_s = self._extremes_s = 0.0  # of the baseline

    def close(self) -> None:
        """End all processes."""
        self.close_candidate()
        if self._baseline is not None:
            self._baseline.close()
            self._baseline = None

    # The baseline.

    def open_baseline(self, timed: Path) -> Measuring:
        """Load the version as it is served; `timed`: the samples that are measured. Raises BaselineError, LateError."""
        if self._baseline is not None:
            self._baseline.close()
        self._timed = timed
        began = time.monotonic()
        try:
            self._baseline = Measuring(self._opening(), BASELINE_S_MAX)
        except ChildFailedError as error:
            raise BaselineError(f"the version cannot be loaded: {error}") from None
        except TimeoutError:
            raise LateError(f"the version was not loaded within {BASELINE_S_MAX:g} s: the machine is busy") from None
        self._load_s = time.monotonic() - began
        return self._baseline

    def answers_s(self, calls: Sequence[Path], rows: int) -> float | None:
        """Return the seconds of all these samples, `rows` at a time; None: the version does not run with them.

        Raises BaselineError if it cannot be loaded, LateError if it takes too long.
        """
        baseline = self.open_baseline(calls[0])
        began = time.monotonic()
        try:
            for path in calls:
                self._answers(baseline, path, rows, BASELINE_S_MAX)
        except TimeoutError:
            raise LateError(f"the version did not answer {rows} rows within {BASELINE_S_MAX:g} s") from None
        except (ChildFailedError, OSError, ValueError):
            return None
        return time.monotonic() - began

    def baseline_s(self, rows: int) -> float:
        """Return the seconds of a run of the baseline. Raises BaselineError, LateError."""
        baseline = self._baseline or self.open_baseline(self._timed)
        try:
            return statistics.median(baseline.times(rows, BLOCK_S, BASELINE_S_MAX))
        except ChildFailedError as error:
            baseline.close()
            self._baseline = None
            self._baseline_failures += 1
            if self._baseline_failures <= BASELINE_FAILURES_MAX and self._expected:  # it ran before
                return self.baseline_s(rows)
            raise BaselineError(f"the version fails with {rows} rows: {error}") from None
        except TimeoutError:
            raise LateError(f"a run of {rows} rows takes more than {BASELINE_S_MAX:g} s") from None

    def use(self, files: SampleFiles, cache: CompiledCache) -> bool:
        """Race with these samples, which the baseline answers first, and this cache. Raises BaselineError, LateError.

        Returns whether the baseline answers the same inputs equally, as far as the gate can tell.
        """
        self._files, self._cache = files, cache
        baseline = self.open_baseline(files.timed)
        began = time.monotonic()
        try:
            self._expected = [self._answers(baseline, path, files.batch_rows, BASELINE_S_MAX) for path in files.judged]
            self._answers_s = time.monotonic() - began
            again = self._answers(baseline, files.judged[0], files.batch_rows, BASELINE_S_MAX)
        except ChildFailedError as error:
            raise BaselineError(f"the version fails with these samples: {error}") from None
        except TimeoutError:
            raise LateError(f"the version did not answer the samples within {BASELINE_S_MAX:g} s") from None
        self._answer_extremes()
        return not self._judgement(self._expected[0], again).why

    def _answer_extremes(self) -> None:
        """Have the baseline answer inputs that no sample has; those that it refuses are left out."""
        began, deaths = time.monotonic(), 0
        for extreme in extremes(self._signature):
            for rows in self._files.sizes:
                left_s = began + EXTREMES_S - time.monotonic()
                if left_s <= 0 or deaths > EXTREME_DEATHS_MAX:
                    return
                try:
                    baseline = self._baseline or self.open_baseline(self._timed)
                    outputs = self._answers(baseline, self._files.judged[0], rows, left_s, extreme)
                    self._extremes.append(_Answered(extreme, rows, outputs))
                except (ChildFailedError, TimeoutError, OSError, ValueError):
                    if self._baseline is not None and self._baseline.ended:
                        self._baseline, deaths = None, deaths + 1
        self._extremes_tried = True
        self._extremes_s = time.monotonic() - began

    # The candidate.

    def compile(self, candidate: Candidate) -> Prepared:
        """Compile, or take what is compiled. Raises LostError."""
        try:
            prepared = self._cache.find(candidate) or self._compile(candidate)
        except OSError as error:
            raise LostError(f"its files cannot be written: {error.strerror}") from None
        self._candidate = candidate
        self._compiled = prepared.compiled, self._cache.root / prepared.folder
        return prepared

    def _compile(self, candidate: Candidate) -> Prepared:
        folder = self._folder / candidate.key
        folder.mkdir()
        try:
            task = CompileTask(
                subject=self._subject,
                candidate=candidate,
                folder=folder,
                samples=self._files.calibration,
                seconds_max=COMPILE_S_MAX,
                memory_bytes=self._task.memory_bytes * 2 or MEMORY_BYTES_MAX,
                share=self._task.share,
                written_bytes=WRITTEN_BYTES + WRITTEN_RATIO * file_bytes(self._task.manifest),
            )
            outcome = compile_candidate(task)
            if outcome.compiled is None:
                raise LostError(outcome.error, outcome.stderr)
            return self._cache.keep(candidate, folder, outcome)
        finally:
            rmtree(folder, ignore_errors=True)

    def close_candidate(self) -> None:
        """End the candidate's process."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def judge(self) -> tuple[Judgement, bool]:
        """Load the candidate; return what the gate says, and whether rows influence each other. Raises LostError."""
        process = self._process = self._start()
        slow_s = SLOW_S + SLOWER_MAX * (2 * self._answers_s + self._extremes_s)  # rows are run alone, too
        try:
            return self._judged(process, time.monotonic() + slow_s)
        except ChildFailedError as error:
            raise self._lost(str(error)) from None
        except TimeoutError:
            why = f"it did not answer the samples within {slow_s:.1f} s; the baseline takes {self._answers_s:.3g} s"
            raise self._lost(why) from None
        except (OSError, ValueError) as error:
            raise self._lost(f"its outputs cannot be read: {error}") from None

    def _judged(self, process: Measuring, deadline: float) -> tuple[Judgement, bool]:
        assert self._compiled is not None
        rows = self._files.batch_rows
        batches = self._signature.batching and rows > 1
        single = batches and (not self._compiled[0].rows_independent or self._influenced(process, deadline))
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
        return judged if judged.why else self._bounded(process, judged, single, deadline), single

    def _bounded(self, process: Measuring, judged: Judgement, single: bool, deadline: float) -> Judgement:
        """Return the judgement with the widest bounds in which the candidate answers extremes as the baseline does.

        Those that it was proven in; with finite numbers alone; with floats as in the samples; with all numbers as in
        the samples. Lossy candidates are calibrated for the samples, and are asked for no other floats.
        """
        assert self._candidate is not None
        assert self._compiled is not None
        signature, lossy = self._signature, self._candidate.lossy
        proven, (floats, numbers) = self._compiled[0].bounds, self._files.ranges
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
            except ChildFailedError as error:
                if process.ended:
                    raise self._lost(f"with {extreme}, {error}") from None
                why = str(error)
            if why:
                failing.append((extreme, f"with {extreme}, in a batch of {rows}: {why}"))
        bounds: Bounds = {}
        inside = failing
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
        return bool(influenced(self._signature, *outputs))

    def _alone(self, process: Measuring, judgement: Judgement, deadline: float) -> Judgement:
        """Return the judgement of some rows alone, if that is worse."""
        actual = self._answers(process, self._files.alone, 1, deadline - time.monotonic())
        expected = [array[: len(actual[0])] for array in self._expected[0]]
        alone = self._judgement(expected, actual)
        return alone._replace(why=f"alone, {alone.why}") if alone.why else judgement

    def round(self, sizes: Sequence[int]) -> dict[int, float]:
        """Measure baseline and candidate in the order A B B A at each size.

        What slows the machine for longer than a round slows both, and a steady drift cancels. Returns how many times as
        fast the candidate was. Raises LostError, BaselineError, LateError.
        """
        return {rows: self._ratio(rows) for rows in sizes}

    def _ratio(self, rows: int) -> float:
        first = self.baseline_s(rows)
        candidate_s = self._block_s(rows, first) + self._block_s(rows, first)
        return (first + self.baseline_s(rows)) / candidate_s

    def _block_s(self, rows: int, baseline_s: float) -> float:
        """Return the median seconds of a run of the candidate."""
        assert self._process is not None
        slow_s = SLOW_S + SLOWER_MAX * max(BLOCK_S, baseline_s)
        try:
            return statistics.median(self._process.times(rows, BLOCK_S, slow_s))
        except ChildFailedError as error:
            raise self._lost(str(error)) from None
        except TimeoutError:
            why = f"a run of {rows} rows did not end within {slow_s:.1f} s; the baseline takes {baseline_s:.3g} s"
            raise self._lost(why) from None

    def _start(self) -> Measuring:
        slow_s = LOAD_S + SLOWER_MAX * self._load_s
        try:
            return Measuring(self._opening(self._compiled), slow_s)
        except ChildFailedError as error:
            raise LostError(f"it cannot be loaded: {error}", error.stderr) from None
        except TimeoutError:
            why = f"it was not loaded within {slow_s:.1f} s; the baseline takes {self._load_s:.2g} s"
            raise LostError(why) from None
        except OSError as error:
            raise LostError(f"its process cannot be started: {error.strerror}") from None

    def _opening(self, of: tuple[Compiled, Path] | None = None) -> Opening:
        """Return what a process loads: a compiled form in its folder; None: the version as it is served."""
        task, path = self._task, self._subject.path
        compiled = of[0] if of is not None else None
        if of is not None and of[0].files:
            path = of[1] / of[0].files[0]
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
        return process.answer(Answer(inputs=path, rows=rows, to=to, extreme=extreme), seconds_max)

    def _lost(self, why: str) -> LostError:
        stderr = self._process.stderr if self._process is not None else ""
        self.close_candidate()
        return LostError(why, stderr)
