"""JSON values, nested as the tensor is, and numpy arrays -> inputs. For protocols that name no shapes.

value ─> shape ─> InputPlan.fit ─> raw form
The nesting of the lists is the shape, but where each row has one element, that may stand alone or in lists: 2, [2] and
[[2]] are one row. Only `row_of_lists` adds the rows to other shapes. A null is NaN where the datatype has one. FP16 and
BF16 are numbers here, though v2 REST has no JSON form for them.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Callable, Sequence
from itertools import chain
from math import prod
from types import NoneType
from typing import Any

import numpy as np
import orjson

from millstream.gateway.tensors.input_plans import CheckedInput
from millstream.gateway.tensors.inputs import InputPlan, InputTensor, OtherDatatype
from millstream.gateway.tensors.number_list import DEPTH_MAX, NumberList
from millstream.services.errors import invalid
from millstream.services.model.datatypes import BYTES, FLOATS, NUMPY, encode_elements

Shape = tuple[int, ...]

_NOUNS = {bool: "a boolean", int: "an integer", float: "a number with a fraction", str: "a string", dict: "an object"}
_B64 = "b64"
_NAN = float("nan")


def is_b64(value: object) -> bool:
    """Whether `value` is the JSON form of bytes: `{"b64": "…"}`."""
    return type(value) is dict and len(value) == 1 and _B64 in value


def from_lists(plan: InputPlan, value: object) -> CheckedInput:
    """Return the input of `plan` that a JSON value holds, its lists nested as the tensor is.

    Elements must match the datatype: integers in range for integer inputs, true and false only for BOOL. BYTES are
    strings (in UTF-8) or `{"b64": "…"}`.

    Raises:
        Failure: INVALID, with the position of the element.
    """
    return _read(plan, value, _with_rows_of_one)


def row_of_lists(plan: InputPlan, value: object) -> CheckedInput:
    """Return the input like `from_lists`, but take a value without the row dimension, or one element, as one row."""
    return _read(plan, value, _with_rows)


def lacks_rows(plan: InputPlan, rank: int) -> bool:
    """Return whether `row_of_lists` adds the rows to a value of this nesting. A list of single elements is a column."""
    return rank < len(plan.shape) and not (rank and plan.is_column)


def _read(plan: InputPlan, value: object, completed: Callable[[InputPlan, Shape], Shape]) -> CheckedInput:
    shape, raw = _part(plan, value)
    shape = completed(plan, shape)
    if 0 in shape and len(shape) < len(plan.shape):  # empty lists leave inner dimensions unknown
        shape = (*shape, *(max(dim, 0) for dim in plan.shape[len(shape) :]))
    extent = plan.fit(plan.datatype, shape)
    return CheckedInput(extent, InputTensor(extent.shape, raw, len(raw)))


def _with_rows_of_one(plan: InputPlan, shape: Shape) -> Shape:
    """Return the shape, that of the input where each row has one element."""
    if plan.is_column and prod(shape[1:]) == 1:
        return (shape[0] if shape else 1, *plan.shape[1:])
    return shape


def _with_rows(plan: InputPlan, shape: Shape) -> Shape:
    wanted = plan.shape
    if not shape and prod(max(dim, 1) for dim in wanted if dim != -1) == 1:
        return (1,) * len(wanted)
    shape = _with_rows_of_one(plan, shape)
    if len(shape) == len(wanted) - 1 and wanted[0] in {-1, 1}:
        return (1, *shape)
    return shape


def _part(plan: InputPlan, value: object) -> tuple[Shape, bytes]:
    """Return shape and raw form of a value, which may be a NumberList, or a list that holds NumberLists."""
    if type(value) is NumberList:
        return _from_number_list(plan, value)
    if type(value) is not list or NumberList not in map(type, value):
        shape, flat = _flat(plan, value)
        return shape, _raw(plan, flat, shape)
    shapes: set[Shape] = set()
    raw: list[bytes] = []
    for at, element in enumerate(value):
        shape, part = _part(plan, element)
        shapes.add(shape)
        raw.append(part)
        if len(shapes) > 1:
            raise invalid(f"input '{plan.name}' at [{at}]: the shape is {list(shape)}, that of its neighbours another")
    return (len(value), *shapes.pop()), b"".join(raw)


def _from_number_list(plan: InputPlan, numbers: NumberList) -> tuple[Shape, bytes]:
    """Return shape and raw form of a NumberList, which is parsed a few elements at a time."""
    raw: list[bytes] = []
    inner: Shape | None = None
    count = 0
    for elements in numbers.rows():
        (size, *rest), flat = _flat(plan, elements, count)
        if inner is not None and tuple(rest) != inner:
            raise invalid(f"input '{plan.name}' at [{count}]: lists of {rest} where its neighbours have {list(inner)}")
        inner = tuple(rest)
        raw.append(_raw(plan, flat, (size, *inner), count))
        count += size
    return ((1,) * numbers.leading_ones + (count, *(inner or ()))), b"".join(raw)


def _flat(plan: InputPlan, value: object, first: int = 0) -> tuple[Shape, list[Any]]:
    """Return shape and elements of `value`. Works level by level, so that no nesting can exhaust the stack.

    `first`: index of the first element of `value` in the list that it is a part of. Raises Failure(INVALID) for ragged
    lists.
    """
    shape: list[int] = []
    level: list[Any] = [value]
    while level:
        kinds = set(map(type, level))
        if list not in kinds:
            break
        if len(shape) == DEPTH_MAX:
            raise invalid(f"input '{plan.name}' is nested deeper than {DEPTH_MAX} levels")
        if kinds != {list}:
            at = next(index for index, part in enumerate(level) if (type(part) is list) != (type(level[0]) is list))
            wanted = "a list" if type(level[0]) is list else "no list"
            raise invalid(
                f"input '{plan.name}'{_position(at, shape, first)}: {wanted} is expected, as in its neighbours"
            )
        size = len(level[0])
        if len(set(map(len, level))) != 1:
            at = next(index for index, part in enumerate(level) if len(part) != size)
            raise invalid(
                f"input '{plan.name}'{_position(at, shape, first)}: a list of {len(level[at])} where its neighbours "
                f"have {size}"
            )
        shape.append(size)
        level = list(chain.from_iterable(level))
    return tuple(shape), level


def _position(index: int, shape: Sequence[int], first: int = 0) -> str:
    """Return the position of the element with this flat index as text: " at [1][0]". `first`: as in `_flat`."""
    indices: list[int] = []
    for size in reversed(shape):
        index, inner = divmod(index, size)
        indices.append(inner)
    if not indices:
        return ""
    indices[-1] += first
    return " at " + "".join(f"[{index}]" for index in reversed(indices))


def _raw(plan: InputPlan, flat: list[Any], shape: Sequence[int], first: int = 0) -> bytes:
    datatype = plan.datatype
    if datatype == BYTES:
        return encode_elements([_bytes_of(plan, element, index, shape, first) for index, element in enumerate(flat)])
    allowed = {bool} if datatype == "BOOL" else {int, float} if datatype in FLOATS else {int}
    kinds = set(map(type, flat))
    if datatype in FLOATS and NoneType in kinds:
        flat = [_NAN if element is None else element for element in flat]
        kinds.remove(NoneType)
    if not kinds <= allowed:
        at = next(index for index, element in enumerate(flat) if type(element) not in allowed)
        noun = _NOUNS.get(type(flat[at]), "null")
        message = f"input '{plan.name}'{_position(at, shape, first)}: {noun} where {datatype} is expected"
        if type(flat[at]) is str or is_b64(flat[at]):
            raise OtherDatatype(plan.name, BYTES, message)
        raise invalid(message)
    if datatype == "BOOL":
        return bytes(flat)
    try:
        if plan.code is not None:
            return struct.pack(f"{len(flat)}{plan.code}", *flat)
        with np.errstate(over="ignore"):
            floats = np.array(flat, np.float64)
            return (to_bf16(floats) if datatype == "BF16" else floats.astype(np.float16)).tobytes()
    except (ArithmeticError, ValueError, TypeError, struct.error):
        raise invalid(f"input '{plan.name}': a number is out of the range of {datatype}") from None


def _bytes_of(plan: InputPlan, value: object, index: int, shape: Sequence[int], first: int) -> bytes:
    try:
        if type(value) is str:
            return value.encode()
        if is_b64(value):
            encoded = value[_B64]  # type: ignore[index]
            if type(encoded) is str:
                return base64.b64decode(encoded, validate=True)
        if plan.document and type(value) is dict:
            return orjson.dumps(value)
    except UnicodeEncodeError:
        raise invalid(f"input '{plan.name}'{_position(index, shape, first)}: the string is not valid Unicode") from None
    except (binascii.Error, ValueError):
        raise invalid(f"input '{plan.name}'{_position(index, shape, first)}: the string is not base64") from None
    noun = _NOUNS.get(type(value), "null")
    raise invalid(
        f'input \'{plan.name}\'{_position(index, shape, first)}: {noun} where a string or {{"b64": "..."}} is expected'
    )


def from_array(plan: InputPlan, array: np.ndarray[Any, Any]) -> CheckedInput:
    """Return `array` as the input of `plan`. Its numbers must be of the same kind; wider numbers are narrowed.

    Raises:
        Failure: INVALID: another shape or kind, or integers out of range.
    """
    extent = plan.fit(plan.datatype, array.shape)
    if plan.datatype == BYTES:
        raw = _raw_of_strings(plan, array)
        return CheckedInput(extent, InputTensor(extent.shape, raw, len(raw)))
    kind = array.dtype.kind
    wanted = NUMPY[plan.datatype]
    fits = kind == "b" if plan.datatype == "BOOL" else kind in ("iuf" if plan.datatype in FLOATS else "iu")
    if not fits:
        raise invalid(f"input '{plan.name}' takes {plan.datatype}, but the array holds {array.dtype}")
    if plan.datatype == "BF16":
        data = to_bf16(array)
    elif plan.datatype == "BOOL":
        data = np.ascontiguousarray(array.view(np.uint8) != 0)  # a file may hold any byte
    else:
        if plan.datatype not in FLOATS and array.size:
            limits = np.iinfo(wanted)
            if int(array.min()) < limits.min or int(array.max()) > limits.max:
                raise invalid(f"input '{plan.name}': a number is out of the range of {plan.datatype}")
        with np.errstate(over="ignore"):
            data = np.ascontiguousarray(array, wanted)
    return CheckedInput(extent, InputTensor(extent.shape, data.reshape(extent.shape), data.nbytes))


def _raw_of_strings(plan: InputPlan, array: np.ndarray[Any, Any]) -> bytes:
    if array.dtype.kind not in "SU":
        raise invalid(f"input '{plan.name}' takes BYTES, but the array holds {array.dtype}")
    flat = array.reshape(-1).tolist()
    try:
        return encode_elements([element.encode() if isinstance(element, str) else element for element in flat])
    except UnicodeEncodeError:
        raise invalid(f"input '{plan.name}': a string is not valid Unicode") from None


def to_bf16(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the upper half of each number's FP32 form, rounded to the nearest, ties to even; NaN stays NaN."""
    with np.errstate(over="ignore"):
        single = np.ascontiguousarray(array, np.float32)
    bits = single.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded)
