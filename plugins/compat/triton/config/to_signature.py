"""Combines the inputs and outputs of a configuration with those of the model file into the signature that clients see.

Signature (from the check) + input, output, max_batch_size ─> Signature (for clients), or Failure(INVALID)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from millstream.plugins.compat.triton.config.config import ParsedConfig, datatype_of, type_name
from millstream.services.errors import Failure, invalid
from millstream.services.ingest.report import Declared
from millstream.services.model.signature import Signature, TensorSpec

ROWS_LIMIT = 65_536

Dims = tuple[int, ...]


def requested_batching(parsed: ParsedConfig) -> bool | None:
    """Return whether max_batch_size requests batching; None if it is absent. Raises Failure(INVALID)."""
    size = parsed.message.max_batch_size
    if size < 0:
        raise invalid(f"max_batch_size {size} is negative")
    if size > ROWS_LIMIT:
        raise invalid(f"max_batch_size {size} is more than {ROWS_LIMIT}")
    return size > 0 if parsed.has_max_batch_size else None


def declared_tensors(parsed: ParsedConfig) -> Declared:
    """Return what the configuration says of the model's inputs and outputs, for the check of a file without it."""
    message = parsed.message
    rows = (-1,) if message.max_batch_size > 0 else ()
    return Declared(
        shapes={
            tensor.name: (*rows, *(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims))
            for tensor in (*message.input, *message.output)
        },
        inputs=frozenset(tensor.name for tensor in message.input),
    )


def client_signature(parsed: ParsedConfig, detected: Signature, notes: Sequence[str]) -> Signature:
    """Return the signature that clients see.

    Args:
        parsed: the configuration.
        detected: the model file's signature, from the check.
        notes: notes of the check; the first one says why the model does not batch.

    Raises:
        Failure: INVALID, if the configuration's names, datatypes or shapes contradict the model's.
    """
    batching = _batching(parsed, detected, notes)
    inputs = _named("input", parsed.message.input, detected.inputs, batching)
    outputs = _named("output", parsed.message.output, detected.outputs, batching)
    if parsed.message.input:
        listed = {tensor.name for tensor in inputs}
        missing = [spec.name for spec in detected.inputs if not (spec.name in listed or spec.optional)]
        if missing:
            raise invalid(f"the model has the input {missing[0]!r}, which the configuration does not list")
    return Signature(inputs=inputs, outputs=outputs, batching=batching)


def _batching(parsed: ParsedConfig, detected: Signature, notes: Sequence[str]) -> bool:
    requested = requested_batching(parsed)
    if requested is None:
        requested = _batching_implied_by_dims(parsed.message, detected)
    if requested is None:
        return detected.batching
    if requested and not detected.batching:
        why = f": {notes[0]}" if notes else ""
        raise invalid(f"the configuration requests batching, but the model cannot batch{why}")
    return requested


def _batching_implied_by_dims(message: Any, detected: Signature) -> bool | None:
    """Return whether the listed `dims` leave out the rows: one dimension fewer than the model has. None if unknown.

    Used if max_batch_size is absent.
    """
    specs = {spec.name: spec for spec in (*detected.inputs, *detected.outputs)}
    for tensor in (*message.input, *message.output):
        spec = specs.get(tensor.name)
        dims = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
        if spec is not None and len(dims) in {len(spec.shape), len(spec.shape) - 1}:
            return len(dims) == len(spec.shape) - 1
    return None


def _named(
    what: str, requested: Sequence[Any], detected: Sequence[TensorSpec], batching: bool
) -> tuple[TensorSpec, ...]:
    if not requested:
        return tuple(detected)
    known = {spec.name: spec for spec in detected}
    specs: dict[str, TensorSpec] = {}
    for tensor in requested:
        if tensor.name not in known:
            names = ", ".join(known) or "none"
            raise invalid(f"unexpected {what} {tensor.name[:80]!r}: the model's {what}s are {names}")
        if tensor.name in specs:
            raise invalid(f"{what} {tensor.name!r} is listed twice")
        try:
            optional = what == "input" and tensor.optional
            if optional and not known[tensor.name].optional:
                raise invalid("optional is true, but the model needs it: the file has no value for it")
            specs[tensor.name] = _spec(tensor, known[tensor.name], batching, optional=optional)
        except Failure as failure:
            raise invalid(f"{what} {tensor.name!r}: {failure.message}") from None
    return tuple(specs.values())


def _spec(tensor: Any, detected: TensorSpec, batching: bool, *, optional: bool) -> TensorSpec:
    datatype = datatype_of(tensor.data_type, "it")
    if datatype != detected.datatype:
        raise invalid(f"data_type is {type_name(datatype)}, but the model has {type_name(detected.datatype)}")
    dims = _dims(tensor.dims, "dims")
    if not dims:
        raise invalid("dims is empty: a tensor needs at least one dimension (use dims: [1] and an empty reshape)")
    own = detected.shape[1:] if batching else detected.shape
    rows = (-1,) if batching else ()
    if not tensor.HasField("reshape"):
        _check_dims(dims, own, batching)
        return detected.model_copy(update={"shape": (*rows, *dims), "optional": optional})
    shape = _dims(tensor.reshape.shape, "reshape")
    _check_reshape(dims, shape)
    _check_dims(shape, own, batching)
    return detected.model_copy(update={"shape": (*rows, *dims), "model_shape": shape, "optional": optional})


def _dims(dims: Sequence[int], what: str) -> Dims:
    if any(dim < 1 and dim != -1 for dim in dims):
        raise invalid(f"{what} {list(dims)}: a dimension is -1 (variable) or at least 1")
    return tuple(int(dim) for dim in dims)


def _check_dims(dims: Dims, own: Dims, batching: bool) -> None:
    """Raise Failure(INVALID) unless `dims` equal the model's dimensions, or fix variable ones to a size."""
    fits = len(dims) == len(own) and all(size in (dim, -1) for dim, size in zip(dims, own, strict=True))
    if not fits:
        without = " without the batch" if batching else ""
        raise invalid(f"the configuration says {list(dims)}, but the model has {list(own)}{without}")


def _check_reshape(dims: Dims, shape: Dims) -> None:
    if dims.count(-1) != shape.count(-1) or abs(math.prod(dims)) != abs(math.prod(shape)):
        raise invalid(f"reshape {list(shape)} and dims {list(dims)} have different numbers of elements")
