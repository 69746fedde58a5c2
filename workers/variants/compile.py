"""python -m millstream.workers.variants.compile: compile one version for this machine, compare, keep, and exit.

stdin: a LoadTask ─> compile ─> same outputs as the version itself? ─> kept, or a report that says why not
It runs at the lowest priority beside a worker that serves the version meanwhile. One process at a time for a variant.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from millstream.services.errors import Failure
from millstream.services.model.datatypes import FLOATS, NUMPY
from millstream.services.model.manifest import Manifest, SourceFile
from millstream.services.model.signature import Signature
from millstream.services.model.warmup_inputs import FILLS, VARIABLE_SIZES, has_variable_dims, make_inputs
from millstream.services.process.threads import lower_process
from millstream.services.repository.disk import try_lock
from millstream.services.repository.folder import FolderRepository
from millstream.services.repository.variants import Report
from millstream.services.settings import read_settings
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Array, Backend, Instance
from millstream.workers.backends.engine_parts import Reshaped
from millstream.workers.models.load_version import REFUSED, read_task, verify
from millstream.workers.models.memory_limit import MemoryLimit

ROWS = (1, 3)  # of the runs whose outputs are compared


def main() -> int:
    task, settings = read_task(), read_settings()
    lower_process(idle=True)
    MemoryLimit(task.memory_bytes)
    repository = FolderRepository(settings.repository_dir)
    try:
        return make(repository, task.manifest, get_backend(task.backend, settings.home), task.device, task.threads)
    except Failure as failure:
        print(failure.message, file=sys.stderr)
        return REFUSED


def make(repository: FolderRepository, manifest: Manifest, backend: Backend, device: str, threads: int) -> int:
    """Compile a version and keep the result. Returns the exit code. Raises Failure if it cannot be compiled."""
    backend.prepare(device)
    target = backend.target(device)
    if target is None:
        return 0
    variants, source = repository.variants, repository.folder_of(manifest)
    with variants.making(manifest) as folder:
        lock = try_lock(folder.parent / f"{target.name}.lock")
        if lock is None or variants.report(manifest, target) is not None:
            return 0  # another worker makes it, or has made it
        try:
            verify(source, manifest)
            began = time.monotonic()
            path = source / manifest.served
            names = backend.compile(path, folder, manifest.signature, device, threads)
            seconds = time.monotonic() - began
            refused = difference(manifest.signature, backend, path, folder / names[0], device)
            variants.keep(manifest, target, folder, _report(folder, names, seconds, refused))
        finally:
            lock.release()
    return 0


def _report(folder: Path, names: Sequence[str], seconds: float, refused: str) -> Report:
    if refused:
        for name in names:
            (folder / name).unlink()
    files = () if refused else tuple(SourceFile(path=name, size_bytes=0, sha256="") for name in names)
    return Report(digest="", target="", runtime="", device="", files=files, refused=refused, seconds=round(seconds, 3))


def difference(signature: Signature, backend: Backend, source: Path, compiled: Path, device: str) -> str:
    """Return how the outputs of the compiled model differ from the version's own; empty: they are equal, bit by bit."""
    expected = _outputs(signature, backend, source, device)
    found = _outputs(signature, backend, compiled, device)
    if expected is None or found is None:
        return "it runs with none of the generated inputs, so that nothing could be compared"
    for spec, one, other in zip(signature.outputs * len(ROWS), expected, found, strict=True):
        if one.dtype != other.dtype or one.shape != other.shape or one.tobytes() != other.tobytes():
            return f"output {spec.name!r} differs from that of the version itself"
    return ""


def _outputs(signature: Signature, backend: Backend, path: Path, device: str) -> list[Array] | None:
    """Return the outputs of runs of ROWS rows; None if the model accepts none of the generated inputs."""
    instance: Instance = backend.load(path, signature, device, 1)
    if signature.reshaped:
        instance = Reshaped(instance, signature)
    try:
        for size in VARIABLE_SIZES if has_variable_dims(signature) else (1,):
            for fill in FILLS:
                try:
                    return [
                        output
                        for rows in ROWS
                        for output in instance.run(_varied(signature, make_inputs(signature, rows, size, fill)))
                    ]
                except Failure:
                    continue
        return None
    finally:
        instance.close()


def _varied(signature: Signature, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Replace floating-point inputs by random numbers, always the same: zeros would hide differences."""
    random = np.random.default_rng(0)
    varied = dict(inputs)
    for spec in signature.inputs:
        if spec.datatype in FLOATS - {"BF16"} and spec.name in varied:
            shape = varied[spec.name].shape
            varied[spec.name] = np.asarray(random.standard_normal(shape)).astype(NUMPY[spec.datatype])
    return varied


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
