"""Conditions of steps: comparisons of small tensors, parsed once and evaluated for each request. Pure.

"max(small.score) < 0.9 and rows(detect.boxes) > 0" ─parse─> Condition ─evaluate(tensors)─> whether the step runs

A name is a tensor; one that is no Python name stands in quotes within a function: max("detect.scores:0"). A tensor
outside of a function has one element. Only what is listed here is understood: nothing of a condition is executed.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from random import random
from typing import Any, NamedTuple

import numpy as np

from millstream.services.errors import Code, Failure, invalid

DEPTH_MAX = 32
#: of a tensor that a condition reads as a whole; `rows` and `size` look at its shape alone
ELEMENTS_MAX = 1 << 20

Value = float | bool | str | int


class ReadTensor(NamedTuple):
    """A tensor as conditions see it. `elements`: flat, an array or a list of bytes."""

    shape: tuple[int, ...]
    elements: np.ndarray[Any, Any] | list[bytes]


_REDUCTIONS: Mapping[str, Callable[[np.ndarray[Any, Any]], Any]] = {
    "max": np.max,
    "min": np.min,
    "sum": np.sum,
    "mean": np.mean,
    "any": np.any,
    "all": np.all,
}
_OF_NOTHING = {"sum": 0, "any": False, "all": True}  # the reductions of a tensor without elements that have a value
_SHAPES: Mapping[str, Callable[[tuple[int, ...]], int]] = {
    "rows": lambda shape: shape[0] if shape else 1,
    "size": lambda shape: int(np.prod(shape)),
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FIRST = "first"  # the first element of a tensor, a number or a text
_DRAW = "draw"  # draw("name"): a number from 0 to 1, one for each request and name
_KNOWN = ", ".join((*_SHAPES, *_REDUCTIONS, _FIRST))


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed condition. `names`: of the tensors that it reads."""

    text: str
    tree: ast.expr
    names: tuple[str, ...]

    def holds(self, tensors: Mapping[str, ReadTensor], draws: dict[str, float]) -> bool:
        """Return whether it holds.

        Args:
            tensors: by name.
            draws: the numbers that were drawn for the request, to which new ones are added.

        Raises:
            Failure: MODEL: a tensor has more elements than a condition reads, or not one where it has to have one.
        """
        return bool(_value(self.tree, tensors, draws))


def parse(text: str) -> Condition:
    """Return a condition. Raises Failure(INVALID) that says what is not understood."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise invalid(
            f"the condition {text[:100]!r} cannot be read: compare tensors, like rows(detect.boxes) > 0"
        ) from None
    names = tuple(dict.fromkeys(_names(tree, text, 0)))
    if not names:
        raise invalid(f"the condition {text[:100]!r} reads no tensor")
    return Condition(text, tree, tuple(name for name in names if name))


def _names(node: ast.expr, text: str, depth: int) -> Iterator[str]:
    """Yield the names of the tensors of an expression, "" for what is drawn. Raises Failure(INVALID)."""
    if depth > DEPTH_MAX:
        raise invalid(f"the condition {text[:100]!r} is nested too deeply")
    match node:
        case ast.BoolOp(values=parts):
            pass
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(one) in _COMPARISONS for one in ops):
            parts = [left, *others]
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            parts = [operand]
        case ast.Constant(value=str() | int() | float()):
            return
        case ast.Name() | ast.Attribute():
            yield _tensor(node, text)
            return
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]) if name in {
            *_REDUCTIONS,
            *_SHAPES,
            _FIRST,
            _DRAW,
        }:
            of = _tensor(argument, text)
            yield "" if name == _DRAW else of
            return
        case _:
            raise invalid(
                f"the condition {text[:100]!r}: {ast.unparse(node)[:60]!r} is not understood; it may have comparisons, "
                f"and, or, not, numbers, texts, and the functions {_KNOWN} of a tensor"
            )
    for part in parts:
        yield from _names(part, text, depth + 1)


def _tensor(node: ast.expr, text: str) -> str:
    """Return the name of a tensor: a, a.b, or "a.b:0"."""
    match node:
        case ast.Constant(value=str(name)):
            return name
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name() | ast.Attribute() as value, attr=attribute):
            return f"{_tensor(value, text)}.{attribute}"
    raise invalid(f"the condition {text[:100]!r}: {ast.unparse(node)[:60]!r} is no tensor")


def _value(node: ast.expr, tensors: Mapping[str, ReadTensor], draws: dict[str, float]) -> Value:
    match node:
        case ast.BoolOp(op=ast.And(), values=parts):
            return all(_value(part, tensors, draws) for part in parts)
        case ast.BoolOp(values=parts):
            return any(_value(part, tensors, draws) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=others):
            values = [_value(part, tensors, draws) for part in (left, *others)]
            return all(_compare(op, a, b) for op, a, b in zip(ops, values, values[1:], strict=False))
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _value(operand, tensors, draws)
        case ast.UnaryOp(operand=operand):
            return -float(_value(operand, tensors, draws))
        case ast.Constant(value=str() | int() | float() as value):
            return value
        case ast.Call(func=ast.Name(id=name), args=[argument]):
            of = _tensor(argument, "")
            return draws.setdefault(of, random()) if name == _DRAW else _reduce(name, of, tensors[of])
    name = _tensor(node, "")
    return _single(name, tensors[name])


def _compare(op: ast.cmpop, a: Value, b: Value) -> bool:
    if isinstance(a, str) is not isinstance(b, str):
        raise Failure(Code.MODEL, f"a text and a number are compared: {a!r} and {b!r}")
    return _COMPARISONS[type(op)](a, b)


def _reduce(name: str, of: str, tensor: ReadTensor) -> Value:
    if name in _SHAPES:
        return _SHAPES[name](tensor.shape)
    elements = tensor.elements
    if name == _FIRST and len(elements):
        return _single(of, ReadTensor((), elements[:1]))
    if isinstance(elements, list):
        raise Failure(Code.MODEL, f"{name}({of}): the tensor has texts, not numbers")
    if elements.size > ELEMENTS_MAX:
        raise Failure(
            Code.MODEL, f"{name}({of}): {elements.size} elements are more than the {ELEMENTS_MAX} it may have"
        )
    if not elements.size:
        if name in _OF_NOTHING:
            return _OF_NOTHING[name]
        raise Failure(Code.MODEL, f"{name}({of}): the tensor has no elements; ask for rows({of}) > 0 first")
    found: Value = _REDUCTIONS[name](elements).item()
    return found


def _single(name: str, tensor: ReadTensor) -> Value:
    if len(tensor.elements) != 1:
        raise Failure(Code.MODEL, f"{name} has the shape {list(tensor.shape)}, not one element: use one of {_KNOWN}")
    element = tensor.elements[0]
    if isinstance(element, bytes):
        return element.decode("utf-8", "replace")
    found: Value = element.item()
    return found
