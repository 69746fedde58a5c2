"""nested: nested lists and numpy arrays -> inputs of a signature, and outputs -> nested JSON. For protocols that name no shapes.

value ─> shape ─> InputPlan.fit ─> raw form        reply ─> own copies ─> JSON text, nested as the shape is
No dimension is added: what is given has the rows in it. FP16 and BF16, which v2 REST keeps out of JSON, are numbers here.
"""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np
import orjson

from millstream.gateway.tensors.elements import DEPTH_MAX, raw_from_strings
from millstream.gateway.tensors.input_plan import Extent, InputPlan
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.json_numbers import numbers
from millstream.gateway.tensors.number_list import NumberList
from millstream.gateway.tensors.outputs import OutputTensor, Reply
from millstream.services.errors import Failure, invalid
from millstream.services.model.datatypes import BYTES, NUMPY

_FLOATS = frozenset({"FP16", "BF16", "FP32", "FP64"})
_NOUNS = {bool: "a boolean", int: "an integer", float: "a number with a fraction", str: "a string", dict: "an object"}
_B64 = "b64"


class Found(NamedTuple):
    """One input as a request brought it."""

    extent: Extent
    tensor: InputTensor


class Inputs(NamedTuple):
    """All inputs of a request, in the signature's order, and their rows."""

    tensors: list[InputTensor]
    rows: int

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)


def join(plans: InputPlans, found: Mapping[str, Found]) -> Inputs:
    """`found` by name as one request. Raises Failure(INVALID): unknown or missing names, rows that differ."""
    for name in found:
        plans.named(name)
    rows = 1
    first = True
    for plan in plans:
        one = found.get(plan.name)
        if one is None:
            continue
        if not first and one.extent.rows != rows:
            raise plans.rows_differ(plan)
        rows, first = one.extent.rows, False
    tensors = [found[plan.name].tensor if plan.name in found else None for plan in plans]
    return Inputs(plans.complete(tensors), rows)


def is_b64(value: object) -> bool:
    """Whether `value` is the JSON form of bytes: `{"b64": "…"}`."""
    return type(value) is dict and len(value) == 1 and _B64 in value


def from_lists(plan: InputPlan, value: object) -> Found:
    """A JSON value, lists nested as the tensor is, as the input of `plan`. Raises Failure(INVALID) with the place.

    Numbers must be of the input's kind: integers for integers and in range, true and false for BOOL alone. BYTES are
    strings (in UTF-8) or `{"b64": "…"}`.
    """
    long = _long(plan, value)
    if long is not None:
        return _of(plan.fit(plan.datatype, long[0]), long[1])
    shape, flat = _flat(plan, value)
    extent = plan.fit(plan.datatype, _completed(plan, shape))
    return _of(extent, _raw(plan, flat, shape))


def row_of_lists(plan: InputPlan, value: object) -> Found:
    """The same, of a value that may lack the rows, or be a single element: it is one row then."""
    long = _long(plan, value)
    if long is not None:
        return _of(plan.fit(plan.datatype, _with_rows(plan, long[0])), long[1])
    shape, flat = _flat(plan, value)
    shape = _with_rows(plan, shape)
    extent = plan.fit(plan.datatype, _completed(plan, shape))
    return _of(extent, _raw(plan, flat, shape))


def _with_rows(plan: InputPlan, shape: tuple[int, ...]) -> tuple[int, ...]:
    wanted = plan.shape
    if not shape and prod(max(dim, 1) for dim in wanted if dim != -1) == 1:
        return (1,) * len(wanted)
    if len(shape) == len(wanted) - 1 and wanted[0] in {-1, 1}:
        return (1, *shape)
    return shape


def _of(extent: Extent, raw: bytes) -> Found:
    return Found(extent, InputTensor(extent.shape, raw, len(raw)))


def _long(plan: InputPlan, value: object) -> tuple[tuple[int, ...], bytes] | None:
    """Shape and raw form of a long list, or of a list some of whose elements are long ones; None: it is neither."""
    if type(value) is NumberList:
        return _in_pieces(plan, value)
    if type(value) is not list or NumberList not in map(type, value):
        return None
    shapes: set[tuple[int, ...]] = set()
    raw: list[bytes] = []
    for at, element in enumerate(value):
        if type(element) is NumberList:
            shape, part = _in_pieces(plan, element)
        else:
            shape, flat = _flat(plan, element)
            part = _raw(plan, flat, shape)
        shapes.add(shape)
        raw.append(part)
        if len(shapes) > 1:
            raise invalid(f"input '{plan.name}' at [{at}]: the shape is {list(shape)}, that of its neighbours another")
    return (len(value), *shapes.pop()), b"".join(raw)


def _in_pieces(plan: InputPlan, numbers: NumberList) -> tuple[tuple[int, ...], bytes]:
    """Shape and raw form of a long list, some elements of it at a time."""
    raw: list[bytes] = []
    inner: tuple[int, ...] | None = None
    count = 0
    for elements in numbers.rows():
        (size, *rest), flat = _flat(plan, elements, count)
        if inner is not None and tuple(rest) != inner:
            raise invalid(f"input '{plan.name}' at [{count}]: lists of {rest} where its neighbours have {list(inner)}")
        inner = tuple(rest)
        raw.append(_raw(plan, flat, (size, *inner), count))
        count += size
    return ((1,) * numbers.leading_ones + (count, *(inner or ()))), b"".join(raw)


def from_array(plan: InputPlan, array: np.ndarray[Any, Any]) -> Found:
    """A numpy array as the input of `plan`, of the same kind of number; wider ones are narrowed, integers in range.

    Raises Failure(INVALID).
    """
    extent = plan.fit(plan.datatype, array.shape)
    if plan.datatype == BYTES:
        return _of(extent, _raw_of_strings(plan, array))
    kind = array.dtype.kind
    wanted = NUMPY[plan.datatype]
    fits = kind == "b" if plan.datatype == "BOOL" else kind in ("iuf" if plan.datatype in _FLOATS else "iu")
    if not fits:
        raise invalid(f"input '{plan.name}' takes {plan.datatype}, but the array holds {array.dtype}")
    if plan.datatype == "BF16":
        data = _bf16(array)
    elif plan.datatype == "BOOL":
        data = np.ascontiguousarray(array.view(np.uint8) != 0)  # a file may hold any byte
    else:
        if plan.datatype not in _FLOATS and plan.datatype != "BOOL":
            _check_range(plan, array, wanted)
        with np.errstate(over="ignore"):
            data = np.ascontiguousarray(array, wanted)
    return Found(extent, InputTensor(extent.shape, data.reshape(extent.shape), data.nbytes))


def _check_range(plan: InputPlan, array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> None:
    limits = np.iinfo(dtype)
    if array.size and (int(array.min()) < limits.min or int(array.max()) > limits.max):
        raise invalid(f"input '{plan.name}': a number is out of the range of {plan.datatype}")


def _raw_of_strings(plan: InputPlan, array: np.ndarray[Any, Any]) -> bytes:
    if array.dtype.kind not in "SU":
        raise invalid(f"input '{plan.name}' takes BYTES, but the array holds {array.dtype}")
    flat = array.reshape(-1).tolist()
    try:
        return raw_from_strings([one.encode() if isinstance(one, str) else one for one in flat])
    except UnicodeEncodeError:
        raise invalid(f"input '{plan.name}': a string is not valid Unicode") from None


def _flat(plan: InputPlan, value: object, first: int = 0) -> tuple[tuple[int, ...], list[Any]]:
    """Shape and elements. Level by level, so that no nesting can exhaust the stack. Raises on ragged lists.

    `first`: how many elements of the same list came before these.
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
            at = next(index for index, one in enumerate(level) if (type(one) is list) != (type(level[0]) is list))
            wanted = "a list" if type(level[0]) is list else "no list"
            raise invalid(f"input '{plan.name}'{_place(at, shape, first)}: {wanted} is expected, as in its neighbours")
        size = len(level[0])
        if len(set(map(len, level))) != 1:
            at = next(index for index, one in enumerate(level) if len(one) != size)
            raise invalid(
                f"input '{plan.name}'{_place(at, shape, first)}: a list of {len(level[at])} where its neighbours have {size}"
            )
        shape.append(size)
        level = list(chain.from_iterable(level))
    return tuple(shape), level


def _completed(plan: InputPlan, shape: tuple[int, ...]) -> tuple[int, ...]:
    """An empty list says nothing of the dimensions within it: they are what the signature wants."""
    if 0 in shape and len(shape) < len(plan.shape):
        return (*shape, *(max(dim, 0) for dim in plan.shape[len(shape) :]))
    return shape


def _place(index: int, shape: Sequence[int], first: int = 0) -> str:
    """Where the element of this flat index stands, as ` at [1][0]`. `first`: what the first index is counted from."""
    places: list[int] = []
    for size in reversed(shape):
        index, place = divmod(index, size)
        places.append(place)
    if not places:
        return ""
    places[-1] += first
    return " at " + "".join(f"[{place}]" for place in reversed(places))


def _raw(plan: InputPlan, flat: list[Any], shape: Sequence[int], first: int = 0) -> bytes:
    datatype = plan.datatype
    if datatype == BYTES:
        return raw_from_strings([_bytes_of(plan, one, index, shape, first) for index, one in enumerate(flat)])
    allowed = {bool} if datatype == "BOOL" else {int, float} if datatype in _FLOATS else {int}
    if not set(map(type, flat)) <= allowed:
        at = next(index for index, one in enumerate(flat) if type(one) not in allowed)
        noun = _NOUNS.get(type(flat[at]), "null")
        raise invalid(f"input '{plan.name}'{_place(at, shape, first)}: {noun} where {datatype} is expected")
    if datatype == "BOOL":
        return bytes(flat)
    try:
        if plan.code is not None:
            return struct.pack(f"{len(flat)}{plan.code}", *flat)
        with np.errstate(over="ignore"):
            floats = np.array(flat, np.float64)
            return (_bf16(floats) if datatype == "BF16" else floats.astype(np.float16)).tobytes()
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
    except UnicodeEncodeError:
        raise invalid(f"input '{plan.name}'{_place(index, shape, first)}: the string is not valid Unicode") from None
    except (binascii.Error, ValueError):
        raise invalid(f"input '{plan.name}'{_place(index, shape, first)}: the string is not base64") from None
    noun = _NOUNS.get(type(value), "null")
    raise invalid(
        f'input \'{plan.name}\'{_place(index, shape, first)}: {noun} where a string or {{"b64": "..."}} is expected'
    )


def _bf16(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The upper half of each FP32, rounded to the nearest, ties to even; NaN stays NaN."""
    with np.errstate(over="ignore"):
        single = np.ascontiguousarray(array, np.float32)
    bits = single.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(0x7FC0), rounded)


# --- outputs ---


def owned(reply: Reply) -> list[OutputTensor]:
    """The same outputs, which may be kept: those of a reply live only while it is read."""
    return [
        output if isinstance(output.array, list) else output._replace(array=np.array(output.array)) for output in reply
    ]


def text_of(output: OutputTensor, *, b64: bool = False) -> bytes:
    """The output as JSON, nested as its shape is. `b64`: BYTES elements as `{"b64": "…"}`.

    NaN and infinities are the tokens that Python and TensorFlow use. Raises Failure(INVALID) for bytes that are no text.
    """
    array = output.array
    if isinstance(array, list):
        return orjson.dumps(nested(_texts(array, b64=b64), output.shape))
    whole = as_numbers(output)
    return numbers(whole) if whole.ndim else numbers(whole.reshape(1))[1:-1]


def as_numbers(output: OutputTensor) -> np.ndarray[Any, Any]:
    """An output that is not BYTES as an array of a dtype that says what it is: BF16 as FP32."""
    array = output.array
    assert not isinstance(array, list)
    if output.datatype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(array).reshape(output.shape)


def rows_of(output: OutputTensor) -> list[OutputTensor]:
    """One output for each index of dimension 0, without that dimension."""
    count, *rest = output.shape
    array = output.array
    if isinstance(array, list):
        size = prod(rest)
        parts: list[Any] = [array[at * size : (at + 1) * size] for at in range(count)]
    else:
        parts = list(array.reshape(output.shape))
    return [OutputTensor(output.datatype, tuple(rest), part) for part in parts]


def nested(flat: list[Any], shape: Sequence[int]) -> Any:
    """`flat` as lists of lists. A shape of no dimensions gives the one element."""
    if not shape:
        return flat[0]
    if 0 in shape:
        return np.empty(shape).tolist()
    for size in reversed(shape[1:]):
        flat = [flat[at : at + size] for at in range(0, len(flat), size)]
    return flat


def _texts(elements: list[bytes], *, b64: bool) -> list[Any]:
    if b64:
        return [{_B64: base64.b64encode(element).decode()} for element in elements]
    try:
        return [element.decode() for element in elements]
    except UnicodeDecodeError:
        raise _no_text() from None


def _no_text() -> Failure:
    return invalid(
        "an output holds bytes that are not UTF-8 and have no JSON form: name the output '…_bytes', or use v2 with binary data"
    )
