"""A user's metric: a safe expression over the figures of an output, such as "cosine > 0.99 and max_abs < 0.1". Pure.

text ─(Python's grammar, a list of allowed nodes)─> tree ─(the figures of one output)─> true or false
Names: cosine, agreement, distance, max_abs, equal. Functions: min, max, abs. No powers, attributes, calls of others.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from millstream.plugins.compile.race.report import METRIC_CHARACTERS_MAX, Gate, OutputFigures
from millstream.services.errors import invalid

NAMES = tuple(name for name in OutputFigures.model_fields if name != "why")
#: Metrics by name, for those who know the figure and not the expression.
NAMED = {
    "cosine": f"cosine >= {Gate().cosine_min}",
    "agreement": f"agreement >= {Gate().agreement_min}",
    "distance": "distance <= 0.02",
    "equal": "equal == 1",
}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs}
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Not: operator.not_,
}


class Metric:
    """A parsed expression.

    Args:
        text: an expression, or a name of NAMED.

    Raises Failure(INVALID) for what is neither.
    """

    def __init__(self, text: str) -> None:
        self.text = NAMED.get(text.strip(), text.strip())
        if len(self.text) > METRIC_CHARACTERS_MAX:
            raise invalid(f"the metric has more than {METRIC_CHARACTERS_MAX} characters")
        try:
            self._tree = ast.parse(self.text, mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise invalid(f"the metric {self.text!r} is no expression: {error}") from error
        self._check(self._tree)

    def holds(self, figures: OutputFigures) -> bool:
        """Return whether it is true of an output. A figure that the output does not have makes it false."""
        values = {name: getattr(figures, name) for name in NAMES}
        if any(isinstance(node, ast.Name) and values.get(node.id, 0.0) is None for node in ast.walk(self._tree)):
            return False
        try:
            return bool(_value(self._tree, values))
        except (ArithmeticError, TypeError, ValueError):
            return False

    def _check(self, tree: ast.expr) -> None:
        for node in ast.walk(tree):
            if problem := _problem(node):
                known = f"names: {', '.join(NAMES)}; functions: {', '.join(_FUNCTIONS)}"
                raise invalid(f"the metric {self.text!r} has {problem}; {known}; + - * /, comparisons, and, or, not")
        functions = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and (node.id in _FUNCTIONS) != (id(node) in functions):
                raise invalid(f"the metric {self.text!r} uses {node.id!r} in the wrong place")


def _problem(node: ast.AST) -> str:
    """Return what is not allowed about a node; empty: nothing."""
    if isinstance(node, ast.Constant):
        return "" if type(node.value) in {int, float, bool} else f"the constant {node.value!r}"
    if isinstance(node, ast.Name):
        return "" if node.id in {*NAMES, *_FUNCTIONS} else f"the unknown name {node.id!r}"
    if isinstance(node, ast.Call):
        plain = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and node.args and not node.keywords
        return "" if plain else "a call that is not allowed"
    allowed = (*_BINARY, *_COMPARISONS, *_UNARY, ast.BinOp, ast.Compare, ast.UnaryOp, ast.BoolOp, ast.boolop, ast.Load)
    return "" if isinstance(node, allowed) else f"{type(node).__name__}, which is not allowed"


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return values[node.id]
        case ast.UnaryOp():
            return _UNARY[type(node.op)](_value(node.operand, values))
        case ast.BinOp():
            return _BINARY[type(node.op)](_value(node.left, values), _value(node.right, values))
        case ast.BoolOp():
            among = any if isinstance(node.op, ast.Or) else all
            return among(_value(one, values) for one in node.values)
        case ast.Compare():
            sides = [_value(one, values) for one in (node.left, *node.comparators)]
            pairs = zip(node.ops, sides, sides[1:], strict=False)
            return all(_COMPARISONS[type(op)](left, right) for op, left, right in pairs)
        case ast.Call(func=ast.Name(id=name)):
            return _FUNCTIONS[name](*(_value(one, values) for one in node.args))
    raise TypeError(type(node).__name__)
