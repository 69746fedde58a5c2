"""One instance that runs each batch with the compiled form that serves, or with the version's own file.

rows ─> within its bounds? ─> the form ── raises or is slow ──> the baseline runs the same batch ─> undone
            └─ no ─> the baseline
The baseline stays loaded: it answers what the form is not trusted with, and live answers are compared with its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from millstream.plugins.compile.race.bounds import Guard
from millstream.plugins.compile.race.gate import differing
from millstream.plugins.compile.stored.selection import Selection
from millstream.plugins.compile.worker.watch import FormWatch
from millstream.services.errors import Failure
from millstream.services.model.signature import Signature
from millstream.workers.backends.base import Array, Instance, OutOfMemory, Terminated, check_outputs

#: For the baseline to answer a batch with which a form did not end; the watchdog ends the process later.
RESCUE_S = 1.0


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
