"""table: one instance that runs each batch with the compiled form that is fastest for its rows.

rows ─> table ─> a variant ── raises or is slow ──> the baseline runs the same batch; what it answers counts ─> undone
The baseline stays loaded during the trial, and for good if the table names it.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from millstream.services.errors import Failure
from millstream.services.model.signature import Signature
from millstream.services.repository.choices import BASELINE, Choice
from millstream.workers.backends.base import Array, Instance, OutOfMemory, Terminated
from millstream.workers.batches.lease import check_outputs
from millstream.workers.variants.watch import VariantWatch

RESCUE_S = (
    1.0  # for the baseline to answer a batch with which a variant did not end; the watchdog ends the process later
)
FAILED_BYTES_MAX = 16 << 20  # of inputs with which a run failed, kept to try them with the baseline


class Entry(NamedTuple):
    """One line of a table.

    Args:
        rows_max: runs of at most so many rows; the last entry has all larger ones.
        key: of the variant, or BASELINE.
    """

    rows_max: int
    key: str


def serving_table(choice: Choice) -> tuple[Entry, ...]:
    """Return the lines of a choice, ascending; a variant whose rows influence each other has runs of one row only."""
    single = {variant.key for variant in choice.variants if variant.single}
    entries: list[Entry] = []
    for rows_max, key in sorted(choice.table.items()):
        if key not in single:
            entries.append(Entry(rows_max, key))
        elif not entries and rows_max > 1:
            entries += [Entry(1, key), Entry(rows_max, BASELINE)]
        else:
            entries.append(Entry(rows_max, key if rows_max <= 1 else BASELINE))
    last = entries[-1]
    if last.key in single:  # larger runs have no other line
        entries.append(Entry(last.rows_max + 1, BASELINE))
    return tuple(entries)


class VariantTable:
    """Implements Instance. Runs are made by one thread; other threads call `terminate` and the methods of the trial.

    Args:
        table: lines, ascending.
        variants: instances by key, without the baseline.
        baseline: the version's own file.
        watch: judges live runs.
        raced_at: of the choice that it follows.
        on_close: called after everything was closed.
    """

    def __init__(
        self,
        table: Sequence[Entry],
        variants: Mapping[str, Instance],
        baseline: Instance,
        signature: Signature,
        watch: VariantWatch,
        raced_at: float,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = [entry.rows_max for entry in table]
        self._forms = [variants.get(entry.key) for entry in table]  # None: the baseline
        self._variants = variants
        self._baseline: Instance | None = baseline
        self._signature = signature
        self._watch = watch
        self._running: Instance = baseline
        self._on_close = on_close
        self._closed = False
        self.raced_at = raced_at
        self.runs = 0  # of variants
        self.undo_reason = ""  # why the variants run no longer
        self.failed_inputs: dict[str, Array] | None = None  # with which a variant failed while no baseline was loaded

    @property
    def needs_baseline(self) -> bool:
        """Whether the table itself names the baseline."""
        return None in self._forms

    @property
    def wants_baseline(self) -> bool:
        """Whether a baseline is to be loaded: to try inputs with it that failed, or to compare live runs."""
        return self._baseline is None and (self.failed_inputs is not None or self._watch.comparing)

    @property
    def baseline(self) -> Instance | None:
        return self._baseline

    def attach(self, baseline: Instance) -> None:
        """Use a baseline that was loaded again."""
        self.failed_inputs = None
        self._baseline = baseline

    def detach(self) -> Instance | None:
        """Stop using the baseline, and return it; the caller closes it when the run in progress has ended."""
        baseline, self._baseline = self._baseline, None
        return baseline

    def fall_back(self, reason: str) -> None:
        """Run everything with the baseline from the next run on, if it is loaded."""
        self.undo_reason = self.undo_reason or reason

    def release(self) -> Instance | None:
        """Close the variants, and return the baseline, which the caller goes on with."""
        baseline, self._baseline = self._baseline, None
        self.close()
        return baseline

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self._all())

    @property
    def lost(self) -> str:
        return next((one.lost for one in self._all() if one.lost), "")

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        baseline, rows = self._baseline, self._rows(inputs)
        form = self._forms[min(bisect_left(self._limits, rows), len(self._forms) - 1)]
        if form is None or (baseline is not None and self.undo_reason):
            form = baseline
        instead = baseline is not None and form is not baseline and self._watch.baseline_next
        self._running = running = baseline if instead and baseline is not None else self._present(form)
        began = time.perf_counter()
        if running is baseline:
            outputs = running.run(inputs)
        else:
            outputs = self._run_variant(running, baseline, inputs, rows)
        if not self.undo_reason and form is not baseline:
            seconds = time.perf_counter() - began
            self.undo_reason = self._watch.ran(rows, seconds, baseline=running is baseline)
        return outputs

    def _run_variant(
        self, variant: Instance, baseline: Instance | None, inputs: Mapping[str, Array], rows: int
    ) -> Sequence[Array]:
        self.runs += 1
        began = time.perf_counter()
        try:
            outputs = variant.run(inputs)
            if baseline is not None:  # later on the runner alone checks them
                check_outputs(list(outputs), self._signature, rows)
            return outputs
        except OutOfMemory:
            raise
        except Terminated:
            # A short deadline of a caller ends runs, too, that take no longer than usual.
            if baseline is None or not self._watch.endless(rows, time.perf_counter() - began):
                raise
            self.fall_back("a run had to be ended because it took too long")
            return self._rescue(baseline, inputs)
        except Failure as failure:
            if baseline is None:
                self._keep_failed(inputs)
                raise
            self._running = baseline
            outputs = baseline.run(inputs)  # raises what the version itself says about wrong inputs
            self.fall_back(f"it fails where the baseline does not: {failure.message}")
            return outputs

    def _rescue(self, baseline: Instance, inputs: Mapping[str, Array]) -> Sequence[Array]:
        """Run a batch with the baseline in the time that the watchdog leaves to a run that it ended."""
        self._running = baseline
        limit = threading.Timer(RESCUE_S, baseline.terminate)
        limit.daemon = True
        limit.start()
        try:
            return baseline.run(inputs)
        finally:
            limit.cancel()

    def _keep_failed(self, inputs: Mapping[str, Array]) -> None:
        if self.failed_inputs is None and sum(array.nbytes for array in inputs.values()) <= FAILED_BYTES_MAX:
            self.failed_inputs = {name: array.copy() for name, array in inputs.items()}

    def _present(self, form: Instance | None) -> Instance:
        if form is not None:
            return form
        return next(iter(self._variants.values()))  # unreachable while `detach` is called only without such lines

    def _rows(self, inputs: Mapping[str, Array]) -> int:
        if self._signature.batching:
            for array in inputs.values():
                return int(array.shape[0]) if array.ndim else 1
        return 1

    def _all(self) -> list[Instance]:
        baseline = self._baseline
        return [*self._variants.values(), *([baseline] if baseline is not None else [])]

    def terminate(self) -> None:
        self._running.terminate()

    def rebuild(self) -> None:
        for one in self._all():
            one.rebuild()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for one in self._all():
            one.close()
        self._on_close()
