"""Matrix products: rows may be on any axis except the one that is summed over."""

from __future__ import annotations

from collections.abc import Hashable

from millstream.plugins.proof.alignment import combine
from millstream.plugins.proof.node import Call, Rule, Rules, dims_of
from millstream.plugins.proof.value import Dependent, Value, free

Labels = list[Hashable]


def matmul_labels(left: int, right: int) -> tuple[Labels, Labels, Labels]:
    """Return axis labels of two operands of these ranks and of their product, as for numpy.matmul."""
    if not left or not right:
        raise Dependent("an operand of the product is a scalar")
    depth = max(left, right) - 2
    a: Labels = [*range(-left + 2, 0), "row", "sum"] if left > 1 else ["sum"]
    b: Labels = [*range(-right + 2, 0), "sum", "column"] if right > 1 else ["sum"]
    product: Labels = list(range(-depth, 0)) if depth > 0 else []
    return a, b, product + ["row"] * (left > 1) + ["column"] * (right > 1)


def product(call: Call, left: Value, right: Value) -> Value:
    """Return the value of numpy.matmul."""
    if left.free and right.free and (left.dims is None or right.dims is None):
        return free()
    a, b, output = matmul_labels(len(dims_of(left)), len(dims_of(right)))
    return combine(call.symbols, [(left, a), (right, b)], output)


def matmul(call: Call) -> list[Value]:
    return [product(call, call.input(0), call.input(1))]


def gemm(call: Call) -> list[Value]:
    """Rule of Gemm: A [row, sum] or transposed, B [sum, column] or transposed, C broadcast to [row, column]."""
    a: Labels = ["sum", "row"] if call.flag("transA") else ["row", "sum"]
    b: Labels = ["column", "sum"] if call.flag("transB") else ["sum", "column"]
    operands: list[tuple[Value, Labels]] = [(call.input(0), a), (call.input(1), b)]
    added = call.optional(2)
    if added is not None:
        if call.version < 7 and len(dims_of(added)) != 2 and not call.flag("broadcast"):
            raise Dependent("the third operand is not broadcast")
        both: Labels = ["row", "column"]
        if added.rows is not None and call.input(0).rows is None and call.input(1).rows is None:
            raise Dependent("only its third operand has rows")  # it must not be larger than the product
        operands.append((added, both[2 - len(dims_of(added)) :]))
    for value, _ in operands[:2]:
        if value.rank != 2:
            raise Dependent("an operand is not known to be a matrix")
    return [combine(call.symbols, operands, ["row", "column"])]


def einsum(call: Call) -> list[Value]:
    """Rule of Einsum, for equations of letters and an ellipsis."""
    equation = call.attribute("equation", b"").decode().replace(" ", "")
    terms, arrow, output = equation.partition("->")
    parts = terms.split(",")
    if len(parts) != len(call.inputs):
        raise Dependent("its equation does not fit its inputs")
    operands = []
    widest = 0
    for index, part in enumerate(parts):
        value = call.input(index)
        labels, hidden = _letters(part, len(dims_of(value)))
        widest = max(widest, hidden)
        operands.append((value, labels))
    if not arrow:
        output = _implicit_output(terms)
    return [combine(call.symbols, operands, _output_letters(output, widest))]


def _letters(part: str, rank: int) -> tuple[Labels, int]:
    before, ellipsis, after = part.partition("...")
    hidden = rank - len(before) - len(after)
    if hidden < 0 or (hidden and not ellipsis):
        raise Dependent("its equation does not fit its inputs")
    return [*before, *range(-hidden, 0), *after], hidden


def _implicit_output(terms: str) -> str:
    letters = terms.replace("...", "").replace(",", "")
    single = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    return ("..." if "..." in terms else "") + single


def _output_letters(output: str, hidden: int) -> Labels:
    before, ellipsis, after = output.partition("...")
    return [*before, *(range(-hidden, 0) if ellipsis else ()), *after]


RULES: Rules = {
    "Einsum": Rule(einsum),
    "Gemm": Rule(gemm),
    "MatMul": Rule(matmul),
}
