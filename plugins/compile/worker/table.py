"""table: one instance that runs each batch with the compiled form that is fastest for its rows.

rows ─> table ─> within its bounds? ─> a variant ── raises or is slow ──> the baseline runs the same batch ─> undone
                       └─ no ─> the baseline
The baseline stays loaded: it answers what no variant is trusted with, and live answers are compared with its own.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from millstream.plugins.compile.race.bounds import Guard
from millstream.plugins.compile.stored.choices import BASELINE, Choice
from millstream.plugins.compile.worker.watch import VariantWatch
from millstream.services.errors import Failure
from millstream.services.model.signature import Signature
from millstream.workers.backends.base import Array, Instance, OutOfMemory, Terminated, check_outputs

RESCUE_S = (
    1.0  # for the baseline to answer a batch with which a variant did not end; the watchdog ends the process later
)


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
        baseline: the version's own file, which runs what no variant may, and what live answers are compared with.
        signature: of the version.
        watch: judges the seconds of live runs.
        choice: that it follows.
        on_close: called after everything was closed.
    """

    def __init__(
        self,
        table: Sequence[Entry],
        variants: Mapping[str, Instance],
        baseline: Instance,
        signature: Signature,
        watch: VariantWatch,
        choice: Choice,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._limits = [entry.rows_max for entry in table]
        self._keys = [entry.key for entry in table]
        self._variants = variants
        self._guards = {one.key: Guard(one.bounds, signature) for one in choice.variants if one.bounds}
        self._baseline = baseline
        self._signature = signature
        self._watch = watch
        self._running = baseline
        self._on_close = on_close
        self._closed = False
        self.choice = choice
        self.form = ""  # key of the variant that made the last run; "": the baseline
        self.runs = 0  # of variants
        self.undo_reason = ""  # why the variants run no longer

    @property
    def baseline(self) -> Instance:
        return self._baseline

    def fall_back(self, reason: str) -> None:
        """Run everything with the baseline from the next run on."""
        self.undo_reason = self.undo_reason or reason

    def release(self) -> None:
        """Close the variants; the caller goes on with the baseline."""
        self._close(self._variants.values())

    @property
    def size_bytes(self) -> int:
        return sum(one.size_bytes for one in self._all())

    @property
    def lost(self) -> str:
        return next((one.lost for one in self._all() if one.lost), "")

    def run(self, inputs: Mapping[str, Array]) -> Sequence[Array]:
        self.form = ""
        rows = self._rows(inputs)
        key = self._keys[min(bisect_left(self._limits, rows), len(self._keys) - 1)]
        guard = self._guards.get(key)
        if key == BASELINE or self.undo_reason or (guard is not None and not guard.admits(inputs)):
            self._running = self._baseline
            return self._baseline.run(inputs)
        instead = self._watch.baseline_next
        self._running = self._baseline if instead else self._variants[key]
        began = time.perf_counter()
        outputs = self._baseline.run(inputs) if instead else self._run_variant(key, inputs, rows)
        if not self.undo_reason:
            self.undo_reason = self._watch.ran(rows, time.perf_counter() - began, baseline=instead)
        return outputs

    def _run_variant(self, key: str, inputs: Mapping[str, Array], rows: int) -> Sequence[Array]:
        self.runs += 1
        began = time.perf_counter()
        try:
            outputs = self._variants[key].run(inputs)
            check_outputs(list(outputs), self._signature, rows)
            self.form = key
            return outputs
        except OutOfMemory:
            raise
        except Terminated:
            # A short deadline of a caller ends runs, too, that take no longer than usual.
            if not self._watch.endless(rows, time.perf_counter() - began):
                raise
            self.fall_back("a run had to be ended because it took too long")
            return self._rescue(self._baseline, inputs)
        except Failure as failure:
            self._running = self._baseline
            outputs = self._baseline.run(inputs)  # raises what the version itself says about wrong inputs
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

    def _rows(self, inputs: Mapping[str, Array]) -> int:
        if self._signature.batching:
            for array in inputs.values():
                return int(array.shape[0]) if array.ndim else 1
        return 1

    def _all(self) -> list[Instance]:
        return [*self._variants.values(), self._baseline]

    def terminate(self) -> None:
        self._running.terminate()

    def rebuild(self) -> None:
        for one in self._all():
            one.rebuild()

    def close(self) -> None:
        self._close(self._all())

    def _close(self, instances: Iterable[Instance]) -> None:
        if self._closed:
            return
        self._closed = True
        for one in instances:
            one.close()
        self._on_close()
