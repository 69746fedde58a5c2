"""Converts model_warmup to Warmup: requests that a version must answer before it is ready."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from millstream.plugins.compat.triton.config.config import datatype_of, type_name
from millstream.services.errors import Failure, invalid
from millstream.services.model.manifest import WARMUPS_MAX, Warmup, WarmupInput
from millstream.services.model.names import WARMUP, plain_path
from millstream.services.model.signature import Signature, TensorSpec

COUNT_MAX = 1000
_FILLS = {"zero_data": "zero", "random_data": "random", "input_data_file": "file"}


def to_warmups(message: Any, signature: Signature, rows_max: int) -> tuple[Warmup, ...]:
    """Return the warm-up requests of a configuration. Raises Failure(INVALID) for unknown, missing or wrong inputs."""
    if len(message.model_warmup) > WARMUPS_MAX:
        raise invalid(f"model_warmup has more than {WARMUPS_MAX} entries")
    return tuple(_warmup(entry, signature, rows_max) for entry in message.model_warmup)


def _warmup(entry: Any, signature: Signature, rows_max: int) -> Warmup:
    what = f"model_warmup {entry.name[:80]!r}"
    rows = entry.batch_size
    if signature.batching and not 1 <= rows <= rows_max:
        raise invalid(f"{what}: batch_size {rows} is not from 1 to max_batch_size {rows_max}")
    if not signature.batching and rows > 1:
        raise invalid(f"{what}: batch_size {rows}, but the model does not batch")
    if entry.count > COUNT_MAX:
        raise invalid(f"{what}: count {entry.count} is more than {COUNT_MAX}")
    try:
        inputs = _inputs(entry.inputs, signature)
    except Failure as failure:
        raise invalid(f"{what}: {failure.message}") from None
    return Warmup(name=entry.name, rows=rows if signature.batching else 0, count=max(1, entry.count), inputs=inputs)


def _inputs(inputs: Mapping[str, Any], signature: Signature) -> dict[str, WarmupInput]:
    specs = {spec.name: spec for spec in signature.inputs}
    for name in inputs:
        if name not in specs:
            raise invalid(f"the model has no input {name[:80]!r}")
    for name, spec in specs.items():
        if name not in inputs and not spec.optional:
            raise invalid(f"input {name!r} is missing")
    return {name: _input(name, entry, specs[name], signature.batching) for name, entry in sorted(inputs.items())}


def _input(name: str, entry: Any, spec: TensorSpec, batching: bool) -> WarmupInput:
    datatype = datatype_of(entry.data_type, f"input {name!r}")
    if datatype != spec.datatype:
        raise invalid(f"input {name!r} has data_type {type_name(datatype)}, not {type_name(spec.datatype)}")
    shape = tuple(int(dim) for dim in entry.dims)
    _check_shape(name, shape, spec.shape[1:] if batching else spec.shape)
    source = entry.WhichOneof("input_data_type")
    if source is None:
        raise invalid(f"input {name!r} has no data: set zero_data, random_data or input_data_file")
    if source == "input_data_file":
        file = plain_path(entry.input_data_file, f"input {name!r}: input_data_file")
        return WarmupInput(datatype=datatype, shape=shape, fill="file", file=f"{WARMUP}/{file}")
    return WarmupInput.model_validate({"datatype": datatype, "shape": shape, "fill": _FILLS[source]})


def _check_shape(name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    fits = len(shape) == len(expected) and all(
        dim in {size, dim if size == -1 else size} for dim, size in zip(shape, expected, strict=True)
    )
    if not fits or any(dim < 0 for dim in shape):
        raise invalid(
            f"input {name!r} has dims {list(shape)}, which do not fit {list(expected)}: set sizes, without the batch"
        )
