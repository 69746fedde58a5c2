"""Quantized operators: scales and zero points must be constants, one per tensor or one per channel."""

from __future__ import annotations

from millstream.plugins.proof.alignment import elementwise
from millstream.plugins.proof.expression import ONE
from millstream.plugins.proof.node import Call, Rule, Rules, dims_of
from millstream.plugins.proof.rules.matrix import product
from millstream.plugins.proof.rules.normalization import check_axis, same
from millstream.plugins.proof.value import Dependent, Value


def linear(call: Call) -> list[Value]:
    """Rule of QuantizeLinear and DequantizeLinear: one scale per tensor, or per index of an axis without rows."""
    call.only_rowed(0)
    value = call.input(0)
    for parameter in call.inputs[1:]:
        if parameter is None or single(parameter):
            continue
        if value.rows is None:
            continue
        if len(dims_of(parameter)) != 1 or call.attribute("block_size", 0):
            raise Dependent("it has a scale for each block")
        check_axis(value, call.axis(len(dims_of(value)), 1))
    return [same(value)]


def single(parameter: Value) -> bool:
    """Return whether a scale or zero point is one number."""
    return all(size == ONE for size in dims_of(parameter))


def check_single(call: Call, *positions: int) -> None:
    """Raise Dependent unless each of the operands is absent, or one number that does not depend on rows."""
    for position in positions:
        parameter = call.optional(position)
        if parameter is not None and (parameter.rows is not None or not single(parameter)):
            raise Dependent("its scale or zero point is not one number for the whole tensor")


def check_column(call: Call, right: Value, *positions: int) -> None:
    """Raise Dependent unless the operands are single numbers, or one per column of a right operand without rows."""
    for position in positions:
        parameter = call.optional(position)
        if parameter is None or (parameter.rows is None and single(parameter)):
            continue
        if parameter.rows is not None or right.rows is not None or len(dims_of(parameter)) != 1:
            raise Dependent("its scale or zero point is not one number for each column of weights")


def linear_matmul(call: Call) -> list[Value]:
    """Rule of QLinearMatMul: a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero."""
    left, right = call.input(0), call.input(3)
    check_single(call, 1, 2, 6, 7)
    check_column(call, right, 4, 5)
    return [product(call, left, right)]


def integer_matmul(call: Call) -> list[Value]:
    """Rule of MatMulInteger: a, b, a_zero, b_zero."""
    left, right = call.input(0), call.input(1)
    check_single(call, 2)
    check_column(call, right, 3)
    return [product(call, left, right)]


def linear_binary(call: Call) -> list[Value]:
    """Rule of QLinearAdd and QLinearMul: a, a_scale, a_zero, b, b_scale, b_zero, c_scale, c_zero."""
    check_single(call, 1, 2, 4, 5, 6, 7)
    return [elementwise(call.symbols, [call.input(0), call.input(3)])]


def linear_unary(call: Call) -> list[Value]:
    """Rule of QLinearLeakyRelu and QLinearSigmoid: x, x_scale, x_zero, y_scale, y_zero."""
    check_single(call, 1, 2, 3, 4)
    return [same(call.input(0))]


RULES: Rules = {
    "DequantizeLinear": Rule(linear),
    "MatMulInteger": Rule(integer_matmul),
    "QLinearMatMul": Rule(linear_matmul),
    "QuantizeLinear": Rule(linear),
}
