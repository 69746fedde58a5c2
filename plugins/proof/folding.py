"""Folds shape arithmetic: small tensors of symbolic integers, which exporters compute for Reshape, Slice and Resize.

Each folder takes the call and the contents of its operands, and returns the result's content or None if unknown.
Source: the ONNX operators of the same names. Floating-point results are used only if single precision is exact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import mul
from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from millstream.plugins.proof.expression import ONE, ZERO, Expression, number
from millstream.plugins.proof.node import Call, constant, normalized
from millstream.plugins.proof.value import (
    CONTENT_ELEMENTS_MAX,
    Content,
    Dependent,
    Element,
    Real,
    Unknown,
    Value,
    contents,
    depends_on_count,
    known,
    stored,
)

Folder = Callable[[Call, list[Content]], Content | None]
_Scalar = Callable[..., Element | None]

_INT32_MAX = 2**31 - 1
#: limits of shape arithmetic: bits of constant factors, of each symbolic size (assumed), and of the whole
_COEFFICIENT_BITS, _SIZE_BITS, _INTEGER_BITS = 20, 15, 63
#: limit on the product of the terms of two polynomials that are combined
_TERMS_MAX = 16


def fold(call: Call) -> list[Value] | None:
    """Return the outputs of an operator on known contents, and on small unknown ones beside them; None for others."""
    folder = FOLDERS.get(call.op) if call.domain == "" else None
    if folder is None or call.outputs != 1 or not any(value and value.content is not None for value in call.inputs):
        return None
    operands: list[Content] = []
    for value in call.inputs:
        content = np.empty(0, object) if value is None else value.content
        if value is not None and content is None:
            content = _unknown_content(value)
        if content is None:
            return None
        operands.append(content)
    try:
        result = folder(call, operands)
    except (Dependent, ValueError, IndexError, TypeError):
        return None
    if result is None or result.size > CONTENT_ELEMENTS_MAX:
        return None
    return [known(_bounded(call, result))]


def _unknown_content(value: Value) -> Content | None:
    """Return unknown elements for a small tensor without rows; None for any other."""
    sizes = [size.constant for size in value.dims] if value.dims is not None and value.rows is None else [None]
    shape = tuple(size for size in sizes if size is not None)
    if len(shape) < len(sizes) or math.prod(shape) > CONTENT_ELEMENTS_MAX or value.numbers is not None:
        return None
    return np.full(shape, Unknown.COUNTED if value.counted else Unknown.FREE, object)


def _bounded(call: Call, content: Content) -> Content:
    """Return the content with elements that exceed the limits of expressions replaced by unknown ones."""
    result = np.empty(content.shape, object)
    for index, element in enumerate(content.flat):
        large = isinstance(element, Expression) and call.symbols.bounded(element) is not element
        result.flat[index] = _unknown([element]) if large else element
    return result


def _unknown(elements: Sequence[object]) -> Unknown:
    return Unknown.COUNTED if any(depends_on_count(element) for element in elements) else Unknown.FREE  # type: ignore[arg-type]


def _elementwise(scalar: _Scalar) -> Folder:
    def folder(_call: Call, operands: list[Content]) -> Content | None:
        shape = np.broadcast_shapes(*(operand.shape for operand in operands))
        if math.prod(shape) > CONTENT_ELEMENTS_MAX:
            return None
        result = np.empty(shape, object)
        spread = [np.broadcast_to(operand, shape) for operand in operands]
        for index in np.ndindex(*shape):
            elements = [operand[index] for operand in spread]
            value = scalar(*elements)
            result[index] = _unknown(elements) if value is None else value
        return result

    return folder


def _exact(value: float) -> float | None:
    """Return the value if single precision represents it exactly, else None."""
    return value if math.isfinite(value) and float(np.float32(value)) == value else None


def _small(value: Expression) -> Expression | None:
    """Return the integer if it cannot overflow for any sizes of its symbols, else None."""
    fixed = value.constant
    if fixed is not None:
        return value if abs(fixed) <= _INT32_MAX else None
    for monomial, coefficient in value.terms:
        bits = coefficient.bit_length()
        if monomial and (bits > _COEFFICIENT_BITS or bits + _SIZE_BITS * len(monomial) > _INTEGER_BITS):
            return None
    return value


def _ring(operation: Callable[[Any, Any], Any]) -> _Scalar:
    """Return the scalar function for addition, subtraction or multiplication."""

    def scalar(left: Element, right: Element) -> Element | None:
        if isinstance(left, Expression) and isinstance(right, Expression):
            return _combined(operation, left, right)
        if isinstance(left, float) and isinstance(right, float):
            return _exact(operation(left, right))
        if isinstance(left, Real) and isinstance(right, Real):
            result = _combined(operation, left.integer, right.integer)
            return None if result is None else Real(result)
        return None

    return scalar


def _combined(operation: Callable[[Any, Any], Any], left: Expression, right: Expression) -> Expression | None:
    if len(left.terms) * len(right.terms) > _TERMS_MAX:
        return None
    return _small(operation(left, right))


def _divide(call: Call) -> _Scalar:
    def scalar(left: Element, right: Element) -> Element | None:
        if isinstance(left, float) and isinstance(right, float):
            return _exact(left / right) if right else None
        if isinstance(left, Real) and isinstance(right, Real):
            quotient = left.integer.over(right.integer) if right.integer.known_positive else None
            return None if quotient is None else Real(quotient)
        if isinstance(left, Expression) and isinstance(right, Expression):
            return _whole_quotient(call, left, right)
        return None

    return scalar


def _whole_quotient(call: Call, left: Expression, right: Expression) -> Expression | None:
    if not right.known_positive or not left.known_natural:
        return None
    top, bottom = left.constant, right.constant
    if top is not None and bottom is not None:
        return number(top // bottom)
    exact = left.over(right)
    return exact if exact is not None else call.symbols.derived("divide", left, right)


def _remainder(left: Element, right: Element) -> Element | None:
    if not isinstance(left, Expression) or not isinstance(right, Expression) or not right.known_positive:
        return None
    if left.over(right) is not None:
        return ZERO
    top, bottom = left.constant, right.constant
    return None if top is None or bottom is None or top < 0 else number(top % bottom)


def _compare(decide: Callable[[int], bool], when_above: bool, when_below: bool) -> _Scalar:
    """Return the scalar function of a comparison.

    `decide` gives the result for the difference of two constants; the others are the results for expressions of which
    the left is known to be greater, or smaller.
    """

    def scalar(left: Element, right: Element) -> Element | None:
        if isinstance(left, float) and isinstance(right, float):
            return number(decide((left > right) - (left < right)))
        if not isinstance(left, Expression) or not isinstance(right, Expression):
            return None
        difference = left - right
        if difference.constant is not None:
            return number(decide(difference.constant))
        if difference.known_positive:
            return number(when_above)
        return number(when_below) if (-difference).known_positive else None

    return scalar


def _extreme(sign: int) -> _Scalar:
    def scalar(*elements: Element) -> Element | None:
        best = elements[0]
        for element in elements[1:]:
            one, other = _integer(best), _integer(element)
            if one is None or other is None:
                return None
            ahead = other - one if sign > 0 else one - other
            if ahead.known_natural:
                best = element
            elif not (-ahead).known_natural:
                return None
        return best

    return scalar


def _integer(element: Element) -> Expression | None:
    """Return the integer that an element is, of whatever type."""
    if isinstance(element, Real):
        return element.integer
    if isinstance(element, float):
        return number(int(element)) if math.isfinite(element) and element == int(element) else None
    return element if isinstance(element, Expression) else None


def _where(condition: Element, yes: Element, no: Element) -> Element | None:
    fixed = condition.constant if isinstance(condition, Expression) else None
    if fixed is None:
        return None
    return yes if fixed else no


def _logic(decide: Callable[[bool, bool], bool]) -> _Scalar:
    def scalar(left: Element, right: Element) -> Element | None:
        if not isinstance(left, Expression) or not isinstance(right, Expression):
            return None
        a, b = left.constant, right.constant
        return None if a is None or b is None else number(decide(bool(a), bool(b)))

    return scalar


def _not(value: Element) -> Element | None:
    fixed = value.constant if isinstance(value, Expression) else None
    return None if fixed is None else number(int(not fixed))


def _whole(rounding: Callable[[float], int]) -> _Scalar:
    def scalar(value: Element) -> Element | None:
        if isinstance(value, float):
            return _exact(float(rounding(value)))
        return value if isinstance(value, Real) else None

    return scalar


def _root(value: Element) -> Element | None:
    if not isinstance(value, float) or value < 0:
        return None
    root = math.sqrt(value)
    return root if root == math.floor(root) else None


def _negative(value: Element) -> Element | None:
    if isinstance(value, float | Expression):
        return -value
    return None


def _cast(call: Call, operands: list[Content]) -> Content | None:
    target = call.attribute("to", 0)
    result = np.empty(operands[0].shape, object)
    for index, element in enumerate(operands[0].flat):
        converted = _converted(element, target)
        result.flat[index] = _unknown([element]) if converted is None else converted
    return result


def _converted(element: Element, target: int) -> Element | None:
    if target in {TensorProto.INT64, TensorProto.INT32}:
        if isinstance(element, Real):
            return element.integer
        if isinstance(element, float):
            return number(int(element)) if abs(element) <= _INT32_MAX else None
        return _small(element) if isinstance(element, Expression) else None
    if target in {TensorProto.FLOAT, TensorProto.DOUBLE}:
        if isinstance(element, Expression):
            fixed = element.constant
            return Real(element) if fixed is None else _exact(float(fixed))
        return element if isinstance(element, Real) else None
    if target == TensorProto.BOOL and isinstance(element, Expression):
        fixed = element.constant
        if fixed is not None:
            return number(fixed != 0)
        return ONE if element.known_positive else None
    return None


def _gather(call: Call, operands: list[Content]) -> Content | None:
    data, indices = operands
    axis = call.axis(data.ndim, 0)
    chosen = np.array([constant(element) for element in indices.flat], np.int64).reshape(indices.shape)
    if ((chosen < -data.shape[axis]) | (chosen >= data.shape[axis])).any():
        return None
    return _take_elements(data, chosen, axis)


def _take_elements(data: Content, chosen: np.ndarray[Any, Any], axis: int) -> Content:
    flat = np.take(data, chosen.reshape(-1), axis=axis)  # of no axes, numpy returns the element itself
    return flat.reshape(data.shape[:axis] + chosen.shape + data.shape[axis + 1 :])


def _concat(call: Call, operands: list[Content]) -> Content | None:
    return np.concatenate(operands, axis=call.axis(operands[0].ndim, 1 if call.version < 4 else 0))


def _slice(call: Call, operands: list[Content]) -> Content | None:
    data = operands[0]
    if call.version < 10:
        starts, ends = list(call.attribute("starts", [])), list(call.attribute("ends", []))
        axes, steps = list(call.attribute("axes", range(len(starts)))), [1] * len(starts)
    else:
        values = [[constant(element) for element in operand.flat] for operand in operands[1:]]
        starts, ends = values[0], values[1]
        axes = values[2] if len(values) > 2 and call.optional(3) is not None else list(range(len(starts)))
        steps = values[3] if len(values) > 3 and call.optional(4) is not None else [1] * len(starts)
    cut: list[slice] = [slice(None)] * data.ndim
    for start, end, axis, step in zip(starts, ends, axes, steps, strict=True):
        cut[normalized(axis, data.ndim)] = slice(start, end, step)
    return data[tuple(cut)]


def _squeeze(call: Call, operands: list[Content]) -> Content | None:
    axes = call.integers(1, "axes")
    data = operands[0]
    dropped = {normalized(axis, data.ndim) for axis in axes} if axes else None
    kept = [size for axis, size in enumerate(data.shape) if (axis not in dropped if dropped is not None else size != 1)]
    return data.reshape(kept)


def _unsqueeze(call: Call, operands: list[Content]) -> Content | None:
    axes = call.integers(1, "axes")
    return None if axes is None else np.expand_dims(operands[0], tuple(axes))


def _reshape(call: Call, operands: list[Content]) -> Content | None:
    data = operands[0]
    target = [constant(element) for element in operands[1].flat]
    if not call.flag("allowzero"):
        target = [data.shape[axis] if size == 0 else size for axis, size in enumerate(target)]
    return data.reshape(target)


def _expand(_call: Call, operands: list[Content]) -> Content | None:
    shape = np.broadcast_shapes(operands[0].shape, tuple(constant(element) for element in operands[1].flat))
    if math.prod(shape) > CONTENT_ELEMENTS_MAX:
        return None
    return np.broadcast_to(operands[0], shape)


def _transpose(call: Call, operands: list[Content]) -> Content | None:
    perm = call.attribute("perm", None)
    return np.transpose(operands[0], None if perm is None else list(perm))


def _reduce_product(call: Call, operands: list[Content]) -> Content | None:
    data = operands[0]
    axes = call.integers(1, "axes")
    if data.ndim != 1 or (axes is not None and axes not in ([0], [-1])):
        return None
    if not axes and call.flag("noop_with_empty_axes"):
        return None
    if not all(isinstance(element, Expression) for element in data):
        return None
    total = ONE
    for element in data:
        result = _combined(mul, total, element)
        if result is None:
            return None
        total = result
    return contents([total]) if call.flag("keepdims", default=True) else contents([total]).reshape(())


def _range(_call: Call, operands: list[Content]) -> Content | None:
    start, limit, step = (constant(operand.flat[0]) for operand in operands)
    if step == 0 or len(range(start, limit, step)) > CONTENT_ELEMENTS_MAX:
        return None
    return contents([number(value) for value in range(start, limit, step)])


def _constant_of_shape(call: Call, operands: list[Content]) -> Content | None:
    shape = tuple(constant(element) for element in operands[0].flat)
    if math.prod(shape) > CONTENT_ELEMENTS_MAX:
        return None
    value = call.attribute("value", None)
    element = stored(numpy_helper.to_array(value)).flat[0] if value is not None else 0.0
    return np.broadcast_to(contents([element]).reshape(()), shape)


def _identity(_call: Call, operands: list[Content]) -> Content | None:
    return operands[0]


FOLDERS: dict[str, Folder] = {
    "Add": _elementwise(_ring(lambda a, b: a + b)),
    "And": _elementwise(_logic(lambda a, b: a and b)),
    "Cast": _cast,
    "Ceil": _elementwise(_whole(math.ceil)),
    "Concat": _concat,
    "ConstantOfShape": _constant_of_shape,
    "Div": lambda call, operands: _elementwise(_divide(call))(call, operands),
    "Equal": _elementwise(_compare(lambda difference: difference == 0, when_above=False, when_below=False)),
    "Expand": _expand,
    "Floor": _elementwise(_whole(math.floor)),
    "Gather": _gather,
    "Greater": _elementwise(_compare(lambda difference: difference > 0, when_above=True, when_below=False)),
    "GreaterOrEqual": _elementwise(_compare(lambda difference: difference >= 0, when_above=True, when_below=False)),
    "Identity": _identity,
    "Less": _elementwise(_compare(lambda difference: difference < 0, when_above=False, when_below=True)),
    "LessOrEqual": _elementwise(_compare(lambda difference: difference <= 0, when_above=False, when_below=True)),
    "Max": _elementwise(_extreme(1)),
    "Min": _elementwise(_extreme(-1)),
    "Mod": _elementwise(_remainder),
    "Mul": _elementwise(_ring(lambda a, b: a * b)),
    "Neg": _elementwise(_negative),
    "Not": _elementwise(_not),
    "Or": _elementwise(_logic(lambda a, b: a or b)),
    "Range": _range,
    "ReduceProd": _reduce_product,
    "Reshape": _reshape,
    "Slice": _slice,
    "Sqrt": _elementwise(_root),
    "Squeeze": _squeeze,
    "Sub": _elementwise(_ring(lambda a, b: a - b)),
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _elementwise(_where),
}
