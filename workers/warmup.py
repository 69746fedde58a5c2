"""The requests that a version must have answered before it is ready, as its config describes them.

config.warmup ─> arrays (zeros, random numbers, a file's bytes) ─> runs; one that fails, fails the load
"""

from __future__ import annotations

from pathlib import Path

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.model.warmup_inputs import requested_inputs, requested_rows
from millstream.workers.backends.base import Instance
from millstream.workers.lease import check_outputs


def warm_up(instance: Instance, manifest: Manifest, folder: Path) -> None:
    """Run them all. `folder`: of the version. Raises Failure(MODEL) with the request's name."""
    signature = manifest.signature
    for warmup in manifest.config.warmup:
        try:
            inputs = requested_inputs(warmup, signature, folder)
            for _ in range(warmup.count):
                check_outputs(list(instance.run(inputs)), signature, requested_rows(warmup, signature))
        except (Failure, OSError, ValueError) as error:
            why = error.message if isinstance(error, Failure) else str(error)
            raise Failure(Code.MODEL, f"warm-up {warmup.name[:80]!r} failed: {why}") from error
