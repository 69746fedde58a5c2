"""Runs the warm-up requests of a version's config, which must succeed before the version is ready.

config.warmup ─> arrays (zeros, random numbers, a file's bytes) ─> runs; a failed run fails the load
"""

from __future__ import annotations

from pathlib import Path

from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest
from millstream.services.model.warmup_inputs import requested_inputs, requested_rows
from millstream.workers.backends.base import Instance, check_outputs


def warm_up(instance: Instance, manifest: Manifest, folder: Path) -> None:
    """Run all warm-up requests; `folder` has the version's files. Raises Failure(MODEL) with the request's name."""
    signature = manifest.signature
    for warmup in manifest.config.warmup:
        try:
            inputs = requested_inputs(warmup, signature, folder)
            for _ in range(warmup.count):
                check_outputs(list(instance.run(inputs)), signature, requested_rows(warmup, signature))
        except (Failure, OSError, ValueError) as error:
            why = error.message if isinstance(error, Failure) else str(error)
            raise Failure(Code.MODEL, f"warm-up {warmup.name[:80]!r} failed: {why}") from error
