"""Checks the warm-up requests of a configuration against the signature, and that their files can be read."""

from __future__ import annotations

import math
from pathlib import Path

from millstream.services.errors import invalid
from millstream.services.model.datatypes import BYTES, ITEM_BYTES
from millstream.services.model.manifest import ModelConfig, Warmup, WarmupInput
from millstream.services.model.signature import Signature, TensorSpec, needed_inputs
from millstream.services.model.version_files import is_readable_inside

WARMUP_BYTES_MAX = 1 << 28  # of one input of a warm-up request


def check_warmups(config: ModelConfig, signature: Signature, folder: Path) -> list[str]:
    """Return the files that warm-up requests read, as paths below the version's `folder`.

    Raises Failure(INVALID) for a request that could never succeed.
    """
    files: list[str] = []
    for warmup in config.warmup:
        where = f"config.warmup {warmup.name[:80]!r}"
        if signature.batching and not 1 <= warmup.rows <= config.rows_max:
            raise invalid(f"{where}: rows must be 1 to rows_max, which is {config.rows_max}, not {warmup.rows}")
        specs = {spec.name: spec for spec in signature.inputs}
        for spec in needed_inputs(signature):
            if spec.name not in warmup.inputs:
                raise invalid(f"{where}: input {spec.name!r} is missing")
        for name, entry in warmup.inputs.items():
            if name not in specs:
                raise invalid(f"{where}: the model has no input {name[:80]!r}; it has {', '.join(specs)}")
            why = _defect(entry, specs[name], warmup, signature.batching)
            if why is None and entry.file is not None:
                files.append(entry.file)
                inside = is_readable_inside(folder, entry.file, WARMUP_BYTES_MAX)
                why = None if inside else f"there is no plain file {entry.file[:200]!r}"
            if why is not None:
                raise invalid(f"{where}: input {name!r}: {why}")
    return files


def _defect(entry: WarmupInput, spec: TensorSpec, warmup: Warmup, batching: bool) -> str | None:
    dims = spec.shape[1:] if batching else spec.shape
    if entry.datatype != spec.datatype:
        return f"datatype {entry.datatype[:20]!r} in place of {spec.datatype}"
    if len(entry.shape) != len(dims) or any(want not in {-1, got} for want, got in zip(dims, entry.shape, strict=True)):
        return f"shape {list(entry.shape)} does not fit {list(dims)}"
    item = 8 if entry.datatype == BYTES else ITEM_BYTES[entry.datatype]
    size = math.prod(entry.shape) * (warmup.rows if batching else 1) * item
    return f"{size} bytes are more than the {WARMUP_BYTES_MAX} allowed" if size > WARMUP_BYTES_MAX else None
