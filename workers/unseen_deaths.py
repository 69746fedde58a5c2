"""What a new worker makes known about deaths of earlier workers of its name that no supervisor saw."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

from millstream.services.crashes import run_marks
from millstream.services.crashes.load_marks import PROBE, record_death, take_stale_marks
from millstream.services.errors import Failure
from millstream.services.queue.death_notices import Death
from millstream.services.repository.folder import FolderRepository
from millstream.workers.batches.consumer import Consumer

log = logging.getLogger("millstream.worker")


def record_unseen_load_deaths(repository: FolderRepository, run_dir: Path, name: str) -> None:
    """Record deaths during loads, of earlier workers of this name and of trial loads, that no supervisor saw."""
    for worker in (name, f"{PROBE}-"):
        marks = take_stale_marks(run_dir, worker)
        try:
            record_death(repository, marks, "in a way that no supervisor saw", time.time(), certain=False)  # noqa: TID251 - for people
        except Failure as failure:
            log.warning("deaths of %s during loads cannot be recorded: %s", worker, failure.message)


def report_unseen_deaths(connect: Callable[[], Consumer], runs: Path, name: str) -> None:
    """Publish deaths of earlier workers of this name that no supervisor saw: their batches must run alone next."""
    for worker in run_marks.marked_workers(runs, name):
        run = run_marks.take_fatal_run(runs, worker)
        if run is None:
            continue
        death = Death(worker, run.batches if run.batches or not run.lane else None, run.lane)
        with contextlib.suppress(Failure), contextlib.closing(connect()) as consumer:
            consumer.publish(death.message())
