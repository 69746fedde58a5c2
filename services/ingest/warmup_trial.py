"""The warm-up of a worker, run in the check: what kills or fails it there is refused at upload.

Signature, config.warmup ─> the same inputs as in millstream.workers.profiler and millstream.workers.warmup ─> runs
Imported by the checker process only.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from millstream.services.errors import Failure, invalid
from millstream.services.ingest.trial_memory import room_for
from millstream.services.ingest.trial_session import Session, TrialError
from millstream.services.model.manifest import Warmup
from millstream.services.model.signature import Signature
from millstream.services.model.warmup_inputs import (
    FILLS,
    INPUT_BYTES_MAX,
    VARIABLE_SIZES,
    has_variable_dims,
    made_bytes,
    make_inputs,
    requested_inputs,
    run_sizes,
)

#: no larger run is begun after this time: workers measure for 2 s
_SECONDS_MAX = 2.0


def rehearse(session: Session, signature: Signature, rows_max: int) -> str | None:
    """Run what a worker runs while it loads the version. Returns why no made-up input would run; None if one did.

    Raises Failure(INVALID): it runs some rows and fails with more, which is a failed load in a worker.
    """
    start = time.monotonic()
    fitting, reason = _fitting(session, signature)
    if fitting is None:
        return reason
    size, fill = fitting
    largest = 1
    for rows in run_sizes(signature, rows_max):
        if time.monotonic() - start > _SECONDS_MAX or made_bytes(signature, rows, size) > INPUT_BYTES_MAX:
            break
        if not room_for(rows, largest):
            break
        try:
            session.run_as_worker(signature, make_inputs(signature, rows, size, fill))
        except TrialError as error:
            if error.memory:
                break  # fewer rows do
            message = f"the model runs {largest} rows but not {rows}: {error}; set rows_max to {largest}"
            raise invalid(message) from error
        largest = rows
    return None


def rehearse_requests(session: Session, signature: Signature, warmups: Sequence[Warmup], folder: Path) -> None:
    """Run each request of config.warmup once. Raises Failure(INVALID) with the request's name."""
    for warmup in warmups:
        try:
            session.run_as_worker(signature, requested_inputs(warmup, signature, folder))
        except (TrialError, Failure, ValueError) as error:
            why = error.message if isinstance(error, Failure) else str(error)
            raise invalid(f"warm-up {warmup.name[:80]!r} failed: {why}") from error


def _fitting(session: Session, signature: Signature) -> tuple[tuple[int, int] | None, str]:
    """The first (size, fill) that one row runs with, or the first reason why none does."""
    reason = "its inputs are too large to make up"
    failed = False
    for size in VARIABLE_SIZES if has_variable_dims(signature) else (1,):
        if made_bytes(signature, 1, size) > INPUT_BYTES_MAX:
            continue
        for fill in FILLS:
            try:
                session.run_as_worker(signature, make_inputs(signature, 1, size, fill))
            except TrialError as error:
                reason = reason if failed else str(error)
                failed = True
            else:
                return (size, fill), ""
    return None, reason
