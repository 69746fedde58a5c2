"""The ranges of values that operators of ONNX return, by the ranges of their operands. Pure.

Only what shapes and indices are computed with has a rule. Ranges of floating-point numbers are known where they were
integers before; any other may be NaN, which no range has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import onnx
from onnx import TensorProto, helper, numpy_helper

from millstream.plugins.compile.candidate import DIMENSION_MAX

SIZE_MAX = (1 << 31) - 1  # elements of a tensor


class Range(NamedTuple):
    """Least and greatest value of a tensor."""

    low: float
    high: float

    @property
    def magnitude(self) -> float:
        return max(abs(self.low), abs(self.high))

    def within(self, limit: float) -> Range:
        """Return the part of the range whose magnitude is at most `limit`."""
        return Range(max(self.low, -limit), min(self.high, limit))


UNKNOWN = Range(-math.inf, math.inf)
BIT = Range(0, 1)
SIZE = Range(0, DIMENSION_MAX)

#: Operators that only move elements -> positions of the operands whose elements are in the output.
MOVES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Expand", "Tile"), (0,)),
    **dict.fromkeys(("Slice", "Split", "Gather", "GatherElements", "GatherND", "Dropout", "DepthToSpace"), (0,)),
    **dict.fromkeys(("SpaceToDepth", "Compress", "ReverseSequence"), (0,)),
    **dict.fromkeys(("Scatter", "ScatterElements", "ScatterND", "Pad"), (0, 2)),
    "Where": (1, 2),
    "Concat": tuple(range(4096)),
}

#: Operators whose outputs have one range, whatever their operands are.
FIXED = {
    **dict.fromkeys(("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN", "IsInf", "EyeLike"), BIT),
    **dict.fromkeys(("And", "Or", "Xor", "Not"), BIT),
    **dict.fromkeys(("Shape", "ArgMax", "ArgMin", "NonZero", "NonMaxSuppression"), SIZE),
    "Sign": Range(-1, 1),
    "Size": Range(0, SIZE_MAX),
}


def moved(node: onnx.NodeProto, ranges: Sequence[Range]) -> Range:
    """Return the range of what moved; UNKNOWN if elements of a scatter are combined."""
    if attribute(node, "reduction", b"none") != b"none":
        return UNKNOWN
    found = [one for at, one in enumerate(ranges) if at in MOVES[node.op_type] and node.input[at]]
    return _union([*found, Range(0, 0)] if node.op_type == "Pad" else found)


def _union(ranges: Sequence[Range]) -> Range:
    return Range(min(one.low for one in ranges), max(one.high for one in ranges))


def summed(one: Range, count: int) -> Range:
    """Return the range of a sum of at most `count` elements."""
    return Range(min(one.low, one.low * count), max(one.high, one.high * count))


Rule = Callable[[onnx.NodeProto, Sequence[Range], bool], Range]
"""Returns the range of an output; the last argument says whether it has integers."""


def _corners(operation: Callable[[float, float], float]) -> Rule:
    """Return the rule of an operation of two operands that is monotonic in each."""

    def rule(_node: onnx.NodeProto, ranges: Sequence[Range], _whole: bool) -> Range:
        first = ranges[0]
        for second in ranges[1:]:
            found = [operation(one, other) for one in first for other in second]
            first = UNKNOWN if any(map(math.isnan, found)) else Range(min(found), max(found))
        return first

    return rule


def _divided(_node: onnx.NodeProto, ranges: Sequence[Range], whole: bool) -> Range:
    """Of integers: toward zero, and the version fails with a divisor of zero."""
    top, bottom = ranges
    contains_zero = bottom.low <= 0 <= bottom.high
    if contains_zero and not whole:
        return UNKNOWN
    most = top.magnitude if whole else top.magnitude / min(abs(bottom.low), abs(bottom.high))
    if whole and not contains_zero:
        most = top.magnitude // min(abs(bottom.low), abs(bottom.high))
    return Range(0 if top.low >= 0 and bottom.low >= 0 else -most, most)


def _remainder(_node: onnx.NodeProto, ranges: Sequence[Range], whole: bool) -> Range:
    top, bottom = ranges
    if not whole:
        return UNKNOWN
    most = max(bottom.magnitude - 1, 0)
    return Range(0 if top.low >= 0 and bottom.low >= 0 else -most, most)


def _cast(node: onnx.NodeProto, ranges: Sequence[Range], whole: bool) -> Range:
    """Of a float to an integer: toward zero; the float itself may be one off by its rounding."""
    found = ranges[0]
    if attribute(node, "to", 0) == TensorProto.BOOL:
        return BIT
    return Range(found.low - 1, found.high + 1) if whole and found != UNKNOWN else found


def _filled(node: onnx.NodeProto, _ranges: Sequence[Range], _whole: bool) -> Range:
    value = attribute(node, "value", None)
    element = 0 if value is None else numpy_helper.to_array(value).reshape(-1)[0].item()
    return Range(element, element)


def _clipped(node: onnx.NodeProto, ranges: Sequence[Range], _whole: bool) -> Range:
    found, given = ranges[0], node.input
    low = ranges[1].low if len(given) > 1 and given[1] else -math.inf
    high = ranges[2].high if len(given) > 2 and given[2] else math.inf
    return Range(min(max(found.low, low), high), max(min(found.high, high), low))


def _widened(below: int, above: int) -> Rule:
    """Return the rule of an operation that rounds: by at most so much."""
    return lambda _node, ranges, _whole: Range(ranges[0].low - below, ranges[0].high + above)


RULES: Mapping[str, Rule] = {
    "Abs": lambda _node, ranges, _whole: Range(0, ranges[0].magnitude),
    "Add": _corners(lambda a, b: a + b),
    "Cast": _cast,
    "Ceil": _widened(0, 1),
    "Clip": _clipped,
    "ConstantOfShape": _filled,
    "Div": _divided,
    "Floor": _widened(1, 0),
    "Max": _corners(max),
    "Min": _corners(min),
    "Mod": _remainder,
    "Mul": _corners(lambda a, b: a * b),
    "Neg": lambda _node, ranges, _whole: Range(-ranges[0].high, -ranges[0].low),
    "OneHot": lambda _node, ranges, _whole: ranges[2],
    "Range": lambda _node, ranges, _whole: _union(ranges[:2]),
    "ReduceMax": _widened(0, 0),
    "ReduceMean": _widened(0, 0),
    "ReduceMin": _widened(0, 0),
    "Round": _widened(1, 1),
    "Sub": _corners(lambda a, b: a - b),
    "Trilu": lambda _node, ranges, _whole: _union([ranges[0], Range(0, 0)]),
}


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    return next((helper.get_attribute_value(one) for one in node.attribute if one.name == name), default)
