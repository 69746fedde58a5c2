"""One instance that runs each batch with the compiled form that serves, or with the version's own file.

rows ─> within its bounds? ─> the form ── raises or is slow ──> the baseline runs the same batch ─> undone
            └─ no ─> the baseline
The baseline stays loaded: it answers what the form is not trusted with, and live answers are compared with its own.

Seconds of live runs ─> FormWatch: a window whose median is high ─> the next batches run as form, baseline, baseline,
form, … ─> medians ─> undo, or go on with a new scale. The baseline was measured before the swap, perhaps on a quieter
machine, so a high median alone undoes nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from math import sqrt
from statistics import median

from millstream.plugins.compile.race.bounds import Guard
from millstream.plugins.compile.race.gate import differing
from millstream.plugins.compile.stored.selection import Selection
from millstream.services.errors import Failure
from millstream.services.model.signature import Signature
from millstream.workers.backends.base import Array, Instance, OutOfMemory, Terminated, check_outputs

#: For the baseline to answer a batch with which a form did not end; the watchdog ends the process later.
RESCUE_S = 1.0
WINDOW = 64  # runs whose median counts
SUSPECT = 1.25  # median of the window beyond which live batches are compared
COMPARED = 12  # runs of each form after which a comparison is judged first, then after twice as many, and so on
COMPARED_MAX = 96  # runs of each form after which a comparison ends without a verdict
SURE = 3.3  # standard deviations of the rank sum by which a form is slower by chance once in 2,000 times
ENDLESS_RUNS = (
    20  # times as long as the baseline's, and ENDLESS_S: a run that was ended then says something of the form
)
ENDLESS_S = 0.5
SLOWER = 1.1  # the variant is undone if its median is larger than the baseline's by this factor


class ServingForm:
    """Implements Instance and live_check.Form. One thread runs it; others call `terminate` and read `undo_reason`.

    Args:
        form: the compiled form, loaded.
        baseline: the version's own file.
        signature: of the version.
        watch: judges the seconds of live runs.
        selection: that it follows.
        on_close: called after the form was closed.
    """

    def __init__(
        self,
        form: Instance,
        baseline: Instance,
        signature: Signature,
        watch: FormWatch,
        selection: Selection,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._form = form
        self._signature = signature
        self._watch = watch
        self._guard = Guard(selection.form.bounds, signature) if selection.form.bounds else None
        self._running = baseline
        self._on_close = on_close
        self._closed = False
        self.baseline = baseline
        self.selection = selection
        self.key = selection.form.key
        self.form = ""  # key of the form if it made the last run; "": the baseline did
        self.runs = 0  # of the form
        self.undo_reason = ""  # why the form runs no longer

    def fall_back(self, reason: str) -> None:
        """Run everything with the baseline from the next run on."""
        self.undo_reason = self.undo_reason or reason

    def difference(self, expected: Sequence[Array], outputs: Sequence[Array]) -> str:
        """Return how outputs of the form differ from the baseline's beyond what its race allowed; empty: they agree."""
        selection = self.selection
        return differing(self._signature, expected, outputs, selection.gate, lossy=selection.form.lossy)

    @property
    def size_bytes(self) -> int:
        return self._form.size_bytes + self.baseline.size_bytes

    @property
    def lost(self) -> str:
        return self._form.lost or self.baseline.lost

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        self.form = ""
        rows = self._rows(inputs)
        outside = (self.selection.form.single and rows > 1) or (
            self._guard is not None and not self._guard.admits(inputs)
        )
        if self.undo_reason or outside:
            self._running = self.baseline
            return self.baseline.run(inputs)
        compared = self._watch.baseline_next
        self._running = self.baseline if compared else self._form
        began = time.perf_counter()
        outputs = self.baseline.run(inputs) if compared else self._run_form(inputs, rows)
        if not self.undo_reason:
            self.undo_reason = self._watch.ran(rows, time.perf_counter() - began, baseline=compared)
        return outputs

    def _run_form(self, inputs: Mapping[str, Array], rows: int) -> Sequence[Array]:
        self.runs += 1
        began = time.perf_counter()
        try:
            outputs = self._form.run(inputs)
            check_outputs(list(outputs), self._signature, rows)
            self.form = self.key
            return outputs
        except OutOfMemory:
            raise
        except Terminated:
            # A short deadline of a caller ends runs, too, that take no longer than usual.
            if not self._watch.endless(rows, time.perf_counter() - began):
                raise
            self.fall_back("a run had to be ended because it took too long")
            return self._rescue(inputs)
        except Failure as failure:
            self._running = self.baseline
            outputs = self.baseline.run(inputs)  # raises what the version itself says about wrong inputs
            self.fall_back(f"it fails where the baseline does not: {failure.message}")
            return outputs

    def _rescue(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Run a batch with the baseline in the time that the watchdog leaves to a run that it ended."""
        self._running = self.baseline
        limit = threading.Timer(RESCUE_S, self.baseline.terminate)
        limit.daemon = True
        limit.start()
        try:
            return self.baseline.run(inputs)
        finally:
            limit.cancel()

    def _rows(self, inputs: Mapping[str, Array]) -> int:
        if self._signature.batching:
            for array in inputs.values():
                return int(array.shape[0]) if array.ndim else 1
        return 1

    def terminate(self) -> None:
        self._running.terminate()

    def rebuild(self) -> None:
        self._form.rebuild()
        self.baseline.rebuild()

    def release(self) -> None:
        """Close the form; the caller goes on with the baseline."""
        if not self._closed:
            self._closed = True
            self._form.close()
            self._on_close()

    def close(self) -> None:
        if not self._closed:
            self.baseline.close()
        self.release()


class FormWatch:
    """What live runs of one form showed.

    Args:
        baseline: rows of a run -> seconds that the baseline took, as measured when the form was swapped in; empty:
            not known, and nothing is compared.
    """

    def __init__(self, baseline: Mapping[int, float]) -> None:
        self._sizes = sorted(baseline)
        self._seconds = [baseline[rows] for rows in self._sizes]
        self._scale = 1.0  # how much longer the baseline takes now than when it was measured
        self._window: deque[float] = deque(maxlen=WINDOW)
        self._compared = (deque[float](maxlen=COMPARED_MAX), deque[float](maxlen=COMPARED_MAX))  # variant, baseline
        self._judged_next = COMPARED  # runs of each form
        self._turn = 0  # of a comparison
        self.comparing = False

    @property
    def baseline_next(self) -> bool:
        """Whether the next live batch runs with the baseline: A B B A of a comparison."""
        return self.comparing and self._turn % 4 in {1, 2}

    def ran(self, rows: int, seconds: float, *, baseline: bool) -> str:
        """Take in one run of live rows; returns why the variant is to be undone; "": it is not."""
        expected = self._expected(rows)
        if not expected:
            return ""
        ratio = seconds / expected
        if self.comparing:
            self._compared[baseline].append(ratio)
            self._turn += 1
            return self._judge() if min(map(len, self._compared)) >= self._judged_next else ""
        if not baseline:
            self._window.append(ratio / self._scale)
            self.comparing = len(self._window) == WINDOW and median(self._window) > SUSPECT
        return ""

    def endless(self, rows: int, seconds: float) -> bool:
        """Return whether a run that was ended had taken far longer than one of the baseline."""
        return seconds >= max(ENDLESS_S, ENDLESS_RUNS * self._expected(rows))

    def _judge(self) -> str:
        """End a comparison, or go on where a busy machine makes the slower form hard to tell."""
        ones, others = (list(one)[-self._judged_next :] for one in self._compared)  # the latest, of both as many
        variant, baseline = median(ones), median(others)
        slower = variant > SLOWER * baseline
        sure = slower and rank_deviations(ones, others) >= SURE
        if slower and not sure and self._judged_next < COMPARED_MAX:
            self._judged_next *= 2
            return ""
        self.comparing, self._turn, self._judged_next = False, 0, COMPARED
        for one in (*self._compared, self._window):
            one.clear()
        if sure:
            return f"live runs took {variant / baseline:.2f} times as long as those of the baseline beside them"
        self._scale = max(1.0, baseline)
        return ""

    def _expected(self, rows: int) -> float:
        """Return the seconds of the baseline for the next larger number of rows that was measured; 0: not known."""
        for size, seconds in zip(self._sizes, self._seconds, strict=True):
            if rows <= size:
                return seconds
        return self._seconds[-1] * rows / self._sizes[-1] if self._sizes else 0.0


def rank_deviations(ones: Sequence[float], others: Sequence[float]) -> float:
    """Return by how many standard deviations `ones` rank above `others`: the test of Mann and Whitney (1947).

    Ranks, because the times of runs on a busy machine follow no normal distribution.
    """
    pairs = len(ones) * len(others)
    above = sum(1.0 if one > other else 0.5 if one == other else 0.0 for one in ones for other in others)
    deviation: float = sqrt(pairs * (len(ones) + len(others) + 1) / 12)
    return (above - pairs / 2) / deviation
