"""Runs a worker's warm-up during the check, so that a model that would fail or crash there is rejected at upload.

Signature, config.warmup ─> the inputs that workers.profiler and workers.warmup also generate ─> runs
Imported by the checker process only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from millstream.services.errors import Failure, invalid
from millstream.services.ingest.report import CheckTask
from millstream.services.ingest.trial_session import TrialError, TrialSession, memory_allows
from millstream.services.model.manifest import ModelConfig, TrialInputs, Warmup
from millstream.services.model.signature import Signature
from millstream.services.model.warmup_inputs import (
    FILLS,
    INPUT_BYTES_MAX,
    VARIABLE_SIZES,
    check_warmups,
    has_variable_dims,
    input_bytes,
    make_inputs,
    requested_inputs,
    run_sizes,
)

#: no larger run is started after this time; workers measure for 2 s, too
_SECONDS_MAX = 2.0


def check_warmup(
    task: CheckTask, session: TrialSession, signature: Signature, *, tried: bool
) -> tuple[TrialInputs | None, str]:
    """Run a worker's warm-up; returns inputs that ran, or None and a note. Raises Failure(INVALID)."""
    check_warmups(ModelConfig(rows_max=task.rows_max, warmup=task.warmup), signature, task.folder)
    ran = _run_loading(session, signature, task.rows_max)
    _run_requests(session, signature, task.warmup, task.folder)
    if isinstance(ran, TrialInputs):
        return ran, ""
    note = f"No generated input runs, so only requests will show whether the model works: {ran}."
    return None, "" if tried else note


def _run_loading(session: TrialSession, signature: Signature, rows_max: int) -> TrialInputs | str:
    """Run what a worker runs while it loads the version. Returns the inputs of the first run, or why none runs.

    Raises Failure(INVALID) if the model runs on some rows and fails on more, since a worker could not load it.
    """
    start = time.monotonic()
    fitting, reason = _fitting(session, signature)
    if fitting is None:
        return reason
    size, fill = fitting.size, fitting.fill
    largest = 1
    for rows in run_sizes(signature, rows_max):
        if time.monotonic() - start > _SECONDS_MAX or input_bytes(signature, rows, size) > INPUT_BYTES_MAX:
            break
        if not memory_allows(rows, largest):
            break
        try:
            session.run_as_worker(signature, make_inputs(signature, rows, size, fill))
        except TrialError as error:
            if error.out_of_memory:
                break  # a worker runs fewer rows then
            message = f"the model runs {largest} rows but not {rows}: {error}; set rows_max to {largest}"
            raise invalid(message) from error
        largest = rows
    return fitting


def _run_requests(session: TrialSession, signature: Signature, warmups: Sequence[Warmup], folder: Path) -> None:
    """Run each request of config.warmup once. Raises Failure(INVALID) with the request's name."""
    for warmup in warmups:
        try:
            session.run_as_worker(signature, requested_inputs(warmup, signature, folder))
        except (TrialError, Failure, ValueError) as error:
            why = error.message if isinstance(error, Failure) else str(error)
            raise invalid(f"warm-up {warmup.name[:80]!r} failed: {why}") from error


def _fitting(session: TrialSession, signature: Signature) -> tuple[TrialInputs | None, str]:
    """Return the first inputs with which the model runs one row, or None and the first error."""
    reason = "its inputs are too large to generate"
    failed = False
    for size in VARIABLE_SIZES if has_variable_dims(signature) else (1,):
        if input_bytes(signature, 1, size) > INPUT_BYTES_MAX:
            continue
        for fill in FILLS:
            try:
                session.run_as_worker(signature, make_inputs(signature, 1, size, fill))
            except TrialError as error:
                reason = reason if failed else str(error)
                failed = True
            else:
                return TrialInputs(size=size, fill=fill), ""
    return None, reason
