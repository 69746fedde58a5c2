"""Operators that compute each element from the elements at the same position, with broadcasting.

Source: ONNX, "Broadcasting in ONNX"; before opset 7 operands had the same shape unless an attribute said otherwise.
"""

from __future__ import annotations

from millstream.plugins.proof.alignment import elementwise
from millstream.plugins.proof.node import Call, Rule, Rules
from millstream.plugins.proof.value import Dependent, Value, counted

_BROADCAST_OPSET = 7

_UNARY = (  # noqa: SIM905
    "Abs Acos Acosh Asin Asinh Atan Atanh BitwiseNot Cast Ceil Celu Cos Cosh Elu Erf Exp Floor Gelu HardSigmoid "
    "HardSwish Identity IsInf IsNaN LeakyRelu Log Mish Neg Not Reciprocal Relu Round Selu Shrink Sigmoid Sign Sin Sinh "
    "Softplus Softsign Sqrt Swish Tan Tanh ThresholdedRelu BitCast RegexFullMatch"
).split()

BROADCASTING = (  # noqa: SIM905
    "Add And BitShift BitwiseAnd BitwiseOr BitwiseXor Div Equal Greater GreaterOrEqual Less LessOrEqual Max Mean Min "
    "Mod Mul Or PRelu Pow StringConcat Sub Sum Where Xor"
).split()


def unary(call: Call) -> list[Value]:
    """Rule of operators with one operand, whose shape the result has."""
    call.flag("saturate", default=True)  # attribute of Cast; for other values ONNX Runtime does not write the output
    value = call.input(0)
    return [Value(value.dims, value.rows)]


def broadcasting(call: Call) -> list[Value]:
    """Rule of operators with any number of operands, which are broadcast to each other."""
    operands = [call.input(index) for index in range(len(call.inputs))]
    if call.domain == "" and call.version < _BROADCAST_OPSET and len(operands) > 1:
        _check_early_broadcast(call)
    return [elementwise(call.symbols, operands)]


def broadcast_dims(call: Call) -> list[Value]:
    """Return a value of which only the dimensions are known, and that it depends on the number of rows."""
    return [counted(broadcasting(call)[0].dims)]


def _check_early_broadcast(call: Call) -> None:
    axis = call.attribute("axis", None)
    first, second = call.input(0), call.input(1)
    if call.flag("broadcast") and axis is not None and axis + (second.rank or 0) != first.rank:
        raise Dependent(f"its broadcasting along an axis, of opset {call.version}, is not supported")


def clip(call: Call) -> list[Value]:
    """Rule of Clip, whose bounds are scalars."""
    call.only_rowed(0)
    return unary(call)


def like(call: Call) -> list[Value]:
    """Rule of CastLike: only the element type of the second operand matters."""
    return unary(call)


def dropout(call: Call) -> list[Value]:
    """Rule of Dropout: the identity, unless the graph runs it in training mode."""
    value = call.input(0)
    if call.version >= 12:
        training = call.optional(2)
        if training is not None and not _is_false(training):
            raise Dependent("it may run in training mode, which is random")
    elif call.version < 7 and not call.flag("is_test"):
        raise Dependent("it runs in training mode, which is random")
    return [Value(value.dims, value.rows)] * 2


def _is_false(value: Value) -> bool:
    return value.content is not None and all(getattr(item, "constant", None) == 0 for item in value.content.flat)


RULES: Rules = {
    **{op: Rule(unary) for op in _UNARY},
    **{op: Rule(broadcasting) for op in BROADCASTING},
    "CastLike": Rule(like, frozenset({1})),
    "Clip": Rule(clip),
    "Dropout": Rule(dropout),
}
