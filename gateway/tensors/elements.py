"""The elements of one tensor: JSON `data` -> raw form, and checks of raw BOOL and BYTES tensors.

`struct` packs the numbers rather than numpy: on the short lists of requests it is several times faster, refuses strings
and nulls, and checks the range of integers. It accepts a boolean as a number; this module refuses those. A null is NaN,
where the datatype has one: MLServer's clients write NaN so.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from types import NoneType
from typing import Any

import numpy as np

from millstream.gateway.tensors.inputs import Extent, InputPlan
from millstream.gateway.tensors.json_document import raise_mistyped
from millstream.gateway.tensors.number_list import DEPTH_MAX, NumberList
from millstream.services.errors import invalid
from millstream.services.model.datatypes import BYTES, LENGTH_BYTES, encode_elements, end_of_elements

_BACKSLASH = ord("\\")  # searching for an int is faster than for a bytes object of length 1
_TO_BOOLEAN = b"\x00" + b"\x01" * 255  # a table for bytes.translate
_PACK_ERRORS = (struct.error, OverflowError, TypeError, ValueError)


def raw_from_json(plan: InputPlan, extent: Extent, data: object, text: bytes) -> bytes:
    """Return the elements `data` in raw form, flat or nested as they were parsed from the JSON `text`.

    Raises Failure(INVALID) for elements of another datatype, or not as many as `extent` has.
    """
    if type(data) is not list:
        if type(data) is NumberList:
            return _raw_in_pieces(plan, extent, data)
        raise_mistyped("data", "array", plan.where)
    if plan.code is None:
        return _raw_bool_or_bytes(plan, extent, data)
    flat = data
    if len(data) != extent.elements or (data and type(data[0]) is list):
        flat = _flatten(plan, data)
    if len(flat) == extent.elements:
        try:
            raw = extent.packer(plan.code)(*flat)
        except _PACK_ERRORS:
            return _raw_checked(plan, extent, data)
        if _no_booleans(text) or bool not in set(map(type, flat)):
            return raw
    return _raw_checked(plan, extent, data)


def _raw_in_pieces(plan: InputPlan, extent: Extent, data: NumberList) -> bytes:
    """Return in raw form a list that is too long to be parsed at once or kept as Python objects."""
    if plan.code is None:
        # this refuses the list: no datatype without a struct code takes numbers
        return _raw_bool_or_bytes(plan, extent, next(data.pieces()))
    raw: list[bytes] = []
    count = 0
    for piece in data.pieces():
        flat = _flatten(plan, piece)
        try:  # the piece has only numbers and lists, no booleans
            raw.append(struct.pack(f"{len(flat)}{plan.code}", *flat))
        except _PACK_ERRORS:
            flat = _strict(plan, piece, _number_types(plan.code))
            raw.append(_packed(plan, struct.Struct(f"{len(flat)}{plan.code}").pack, flat))
        count += len(flat)
        if count > extent.elements:
            break  # the count is wrong already
    _check_count(plan, extent, count)
    return b"".join(raw)


def _no_booleans(text: bytes) -> bool:
    """Whether `data` in `text` is certain to hold neither true nor false. Costs three searches of the text.

    Both words contain an "e" and come after the first `"data"`, unless that key is written with escapes.
    """
    return _BACKSLASH not in text and text.rfind(b"e") < text.find(b'"data"')


def _raw_checked(plan: InputPlan, extent: Extent, data: list[Any]) -> bytes:
    """Pack numbers that `struct` refused: raise the reason, or let numbers out of range become infinities."""
    assert plan.code is not None
    flat = _strict(plan, data, _number_types(plan.code))
    _check_count(plan, extent, len(flat))
    return _packed(plan, extent.packer(plan.code), flat)


def _number_types(code: str) -> set[type]:
    return {int, float, NoneType} if code in "fd" else {int}


def _packed(plan: InputPlan, pack: Callable[..., bytes], flat: list[Any]) -> bytes:
    try:
        return pack(*flat)
    except _PACK_ERRORS:
        if plan.code is not None and plan.code in "fd":  # null, or out of range: an integer, on Python 3.14 a float
            return _rounded(plan.code, flat)
        raise invalid(
            f"Unable to parse 'data': an element is out of the range of {plan.datatype}{plan.where}"
        ) from None


def _rounded(code: str, flat: list[Any]) -> bytes:
    """Pack numbers; those outside the range of the datatype become infinities, and null NaN."""
    with np.errstate(over="ignore"):
        return np.array(list(map(_double, flat)), np.float64).astype(code).tobytes()


def _double(value: float | None) -> float:
    if value is None:
        return float("nan")
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def _raw_bool_or_bytes(plan: InputPlan, extent: Extent, data: list[Any]) -> bytes:
    if plan.datatype not in {"BOOL", BYTES}:
        raise invalid(
            f"receiving {plan.datatype} data via JSON is not supported. "
            f"Please use the binary data format for input {plan.name}"
        )
    flat = _strict(plan, data, {bool} if plan.datatype == "BOOL" else {str})
    _check_count(plan, extent, len(flat))
    if plan.datatype == "BOOL":
        return bytes(flat)
    try:
        return encode_elements([text.encode() for text in flat])
    except UnicodeEncodeError:
        raise invalid(f"Unable to parse 'data': a string is not valid Unicode{plan.where}") from None


def _strict(plan: InputPlan, data: list[Any], types: set[type]) -> list[Any]:
    """Return the elements of `data` in order. Raises Failure(INVALID) unless all are of `types`."""
    flat = _flatten(plan, data)
    kinds = set(map(type, flat))
    if list in kinds:
        flat = _flatten_uneven(plan, data)
        kinds = set(map(type, flat))
    if not kinds <= types:
        at = next(index for index, element in enumerate(flat) if type(element) not in types)
        raise_mistyped("data", plan.json_type, f"{plan.where}: element {at}")
    return flat


def _check_count(plan: InputPlan, extent: Extent, count: int) -> None:
    if count != extent.elements:
        raise invalid(
            f"Unable to parse 'data': Shape does not match true shape of 'data' field{plan.where}: "
            f"{extent.elements} elements expected, got {count}"
        )


def _flatten(plan: InputPlan, data: list[Any]) -> list[Any]:
    """Return the elements of evenly nested lists. If the nesting is uneven, the result still holds lists."""
    for _ in range(DEPTH_MAX):
        if not data or type(data[0]) is not list:
            return data
        if len(data) == 1:
            data = data[0]
        elif set(map(type, data)) == {list}:
            data = list(chain.from_iterable(data))
        else:
            return data
    raise _too_deep(plan)


def _flatten_uneven(plan: InputPlan, data: list[Any]) -> list[Any]:
    """Return the elements of lists of any nesting. Does not recurse."""
    flat: list[Any] = []
    stack = [iter(data)]
    while stack:
        for element in stack[-1]:
            if type(element) is list:
                if len(stack) == DEPTH_MAX:
                    raise _too_deep(plan)
                stack.append(iter(element))
                break
            flat.append(element)
        else:
            stack.pop()
    return flat


def _too_deep(plan: InputPlan) -> Exception:
    return invalid(f"Unable to parse 'data': nested deeper than {DEPTH_MAX} levels{plan.where}")


def normalize_booleans(data: memoryview) -> memoryview | bytes:
    """Return a raw BOOL tensor in which every byte but 0 became 1.

    The reference server takes any byte, and its perf_analyzer sends them. A model must not see them: two bytes that are
    both true would not be equal.
    """
    raw = bytes(data)
    return raw.translate(_TO_BOOLEAN) if raw.translate(None, b"\x00\x01") else data


def check_strings(plan: InputPlan, extent: Extent, data: memoryview) -> None:
    """Raise Failure(INVALID) unless the lengths in a raw BYTES tensor lead to its end in `extent.elements` steps."""
    end = len(data)
    if extent.elements * LENGTH_BYTES <= end:  # else the loop could be long for few bytes
        with suppress(struct.error):
            if end_of_elements(data, 0, extent.elements) == end:
                return
    raise invalid(
        f"the {end} bytes of BYTES data are not {extent.elements} elements, each after its length as 4 bytes"
        f"{plan.where}"
    )
