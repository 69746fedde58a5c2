"""The inputs and outputs of a configuration, held against those of the model file: what clients see of it.

Signature (of the check) + input, output, max_batch_size ─> Signature (of the configuration), or a clear refusal
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from millstream.services.errors import Failure, invalid
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.triton_config.config import Given
from millstream.services.triton_config.datatypes import datatype_of, type_name

ROWS_LIMIT = 65_536

Dims = tuple[int, ...]


def wanted_batching(given: Given) -> bool | None:
    """What max_batch_size asks for; None: it is not there. Raises Failure(INVALID)."""
    size = given.message.max_batch_size
    if size < 0:
        raise invalid(f"max_batch_size {size} is negative")
    if size > ROWS_LIMIT:
        raise invalid(f"max_batch_size {size} is more than {ROWS_LIMIT}")
    return size > 0 if given.says_batch else None


def fitted(given: Given, found: Signature, notes: Sequence[str]) -> Signature:
    """What clients see of a model in which the check found `found`. `notes`: of the check, why it does not batch.

    Raises Failure(INVALID): other names, datatypes or shapes than the model has.
    """
    batching = _batching(given, found, notes)
    inputs = _named("input", given.message.input, found.inputs, batching)
    outputs = _named("output", given.message.output, found.outputs, batching)
    if given.message.input:
        missing = [spec.name for spec in found.inputs if spec.name not in {one.name for one in inputs}]
        if missing:
            raise invalid(f"the model has the input {missing[0]!r}, which the configuration does not list")
    return Signature(inputs=inputs, outputs=outputs, batching=batching)


def _batching(given: Given, found: Signature, notes: Sequence[str]) -> bool:
    wanted = wanted_batching(given)
    if wanted is None:
        wanted = _implied(given.message, found)
    if wanted is None:
        return found.batching
    if wanted and not found.batching:
        why = f": {notes[0]}" if notes else ""
        raise invalid(f"the model cannot batch, as the configuration wants it to{why}")
    return wanted


def _implied(message: Any, found: Signature) -> bool | None:
    """Without max_batch_size, dims tell by their number whether they leave out the rows."""
    specs = {spec.name: spec for spec in (*found.inputs, *found.outputs)}
    for one in (*message.input, *message.output):
        spec = specs.get(one.name)
        dims = one.reshape.shape if one.HasField("reshape") else one.dims
        if spec is not None and len(dims) in {len(spec.shape), len(spec.shape) - 1}:
            return len(dims) == len(spec.shape) - 1
    return None


def _named(what: str, wanted: Sequence[Any], found: Sequence[TensorSpec], batching: bool) -> tuple[TensorSpec, ...]:
    if not wanted:
        return tuple(found)
    known = {spec.name: spec for spec in found}
    specs: dict[str, TensorSpec] = {}
    for one in wanted:
        if one.name not in known:
            names = ", ".join(known) or "none"
            raise invalid(f"unexpected {what} {one.name[:80]!r}: the model's {what}s are {names}")
        if one.name in specs:
            raise invalid(f"{what} {one.name!r} is listed twice")
        try:
            specs[one.name] = _spec(one, known[one.name], batching, optional=what == "input" and one.optional)
        except Failure as failure:
            raise invalid(f"{what} {one.name!r}: {failure.message}") from None
    return tuple(specs.values())


def _spec(one: Any, found: TensorSpec, batching: bool, *, optional: bool) -> TensorSpec:
    datatype = datatype_of(one.data_type, "it")
    if datatype != found.datatype:
        raise invalid(f"data_type is {type_name(datatype)}, but the model has {type_name(found.datatype)}")
    dims = _dims(one.dims, "dims")
    if not dims:
        raise invalid("dims is empty: a tensor needs one dimension at least (use dims: [1] and an empty reshape)")
    own = found.shape[1:] if batching else found.shape
    rows = (-1,) if batching else ()
    if not one.HasField("reshape"):
        _check_dims(dims, own, batching)
        return found.model_copy(update={"shape": (*rows, *dims), "optional": optional})
    shape = _dims(one.reshape.shape, "reshape")
    _check_reshape(dims, shape)
    _check_dims(shape, own, batching)
    return found.model_copy(update={"shape": (*rows, *dims), "model_shape": shape, "optional": optional})


def _dims(dims: Sequence[int], what: str) -> Dims:
    if any(dim < 1 and dim != -1 for dim in dims):
        raise invalid(f"{what} {list(dims)}: a dimension is -1 (variable) or at least 1")
    return tuple(int(dim) for dim in dims)


def _check_dims(dims: Dims, own: Dims, batching: bool) -> None:
    """A variable dimension of the model may be narrowed to a size, a fixed one stays."""
    fits = len(dims) == len(own) and all(size in (dim, -1) for dim, size in zip(dims, own, strict=True))
    if not fits:
        without = " without the batch" if batching else ""
        raise invalid(f"the configuration says {list(dims)}, but the model has {list(own)}{without}")


def _check_reshape(dims: Dims, shape: Dims) -> None:
    if dims.count(-1) != shape.count(-1) or abs(math.prod(dims)) != abs(math.prod(shape)):
        raise invalid(f"reshape {list(shape)} has not as many elements as dims {list(dims)}")
