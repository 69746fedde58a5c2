"""A file and its backend ─> an instance that is warmed up and measured, beside one that serves."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

from millstream.services.model.manifest import Manifest
from millstream.services.process.threads import at_low_priority, in_own_thread
from millstream.workers.backends.base import Backend, Instance, Stop
from millstream.workers.models.load_version import LoadEnvironment, took_too_long
from millstream.workers.models.profiler import measure, warm_up
from millstream.workers.models.reshape import Reshaped

LOAD_S_MAX = 300.0  # for loading, warming up and measuring one form
MEASURE_S_MAX = 2.0

Value = str | int | float | bool


def open_form(
    manifest: Manifest,
    files: tuple[Path, Path],
    backend: Backend,
    at: LoadEnvironment,
    options: Mapping[str, Value],
    rows_max: int,
) -> tuple[Instance, dict[int, float]]:
    """Load one form of a version; return it with the seconds of runs by rows.

    `files` are the version's folder and the file to load; `options` are those of Backend.load; `rows_max` is the most
    rows of a run.

    Raises Failure: MODEL, OutOfMemory, UNAVAILABLE if the library is not installed, INVALID for unknown options.
    """
    folder, path = files
    stop = Stop()
    limit = threading.Timer(LOAD_S_MAX, lambda: stop.request(took_too_long("loading", LOAD_S_MAX)))
    limit.daemon = True
    limit.start()
    try:
        backend.prepare(at.device)
        # In a new thread, at the normal priority: threads that a library starts while it loads inherit it, and serve
        # later, and a backend lowers its thread once they have started.
        instance = in_own_thread(
            lambda: backend.load(path, manifest.signature, at.device, at.threads, stop, options=options)
        )
        try:
            if manifest.signature.reshaped:
                instance = Reshaped(instance, manifest.signature)
            stop.on_request(instance.terminate)
            return instance, at_low_priority(lambda: _prepare(manifest, folder, instance, rows_max))
        except BaseException:
            instance.close()
            raise
    finally:
        limit.cancel()


def _prepare(manifest: Manifest, folder: Path, instance: Instance, rows_max: int) -> dict[int, float]:
    warm_up(instance, manifest, folder)
    return dict(measure(instance, manifest.signature, rows_max, MEASURE_S_MAX).seconds)
