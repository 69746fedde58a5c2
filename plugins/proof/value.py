"""The abstract values of the analysis: what is known about a tensor, for every number of rows at once.

rowed    one axis holds the rows: its element (outer, row, inner) depends only on that row of the inputs
free     depends neither on rows nor on their number (weights, and values computed from them)
counted  depends on the number of rows, not on their data (shapes, and values computed from them)
mixed    anything else: `Mixed` names the operator that mixed the rows
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from millstream.plugins.proof.expression import ONE, ROWS, Expression, number

Dims = tuple[Expression, ...]
Content = np.ndarray[Any, np.dtype[Any]]
"""The elements of a small tensor; see `Element`."""

#: tensors with more elements have no content: they are data and not shapes
CONTENT_ELEMENTS_MAX = 256


class Unknown(Enum):
    """An element of unknown value, which does or does not depend on the number of rows."""

    FREE = "free"
    COUNTED = "counted"


@dataclass(frozen=True, slots=True)
class Real:
    """An integer that was cast to a floating-point type."""

    integer: Expression


Element = Expression | Real | float | Unknown
"""Expression: an integer, or a boolean as 0 or 1."""


class Dependent(Exception):
    """Rows influence each other here, or may do so. The message is the reason, worded to follow "…: "."""


class Rows(NamedTuple):
    """The position of the rows: `axis` has outer * rows * inner elements, the last factor varying fastest."""

    axis: int
    outer: Expression = ONE
    inner: Expression = ONE

    @property
    def size(self) -> Expression:
        return self.outer * ROWS * self.inner

    def moved(self, axis: int) -> Rows:
        """Return the same layout on another axis."""
        return self._replace(axis=axis)


class Numbers(NamedTuple):
    """Row numbers: elements at i along `axis` are i * `stride`, plus each number from 0 to `span` - 1.

    `leading`: only at index 0 of the last axis, followed by other data.
    """

    axis: int
    leading: bool = False
    stride: Expression = ONE
    span: Expression = ONE


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """A tensor that is rowed, free or counted.

    Args:
        dims: None if the rank is unknown; always known for a rowed value.
        numbers: the row numbers that a counted value contains, if any.
        span: the elements are all numbers from 0 to `span` - 1, each at least once.
    """

    dims: Dims | None
    rows: Rows | None = None
    counted: bool = False
    content: Content | None = None
    numbers: Numbers | None = None
    span: Expression | None = None

    @property
    def free(self) -> bool:
        return self.rows is None and not self.counted

    @property
    def rank(self) -> int | None:
        return None if self.dims is None else len(self.dims)


class Mixed(NamedTuple):
    """Rows may influence each other in this value. `culprit`: the operator; `reason`: worded to follow "…: "."""

    culprit: str
    reason: str


AnyValue = Value | Mixed


def rowed(dims: Sequence[Expression], rows: Rows) -> Value:
    """Return a value with rows. Raises Dependent if another dimension depends on their number."""
    shape = tuple(dims)
    if any(size.counted for axis, size in enumerate(shape) if axis != rows.axis):
        raise Dependent("a dimension other than that of the rows depends on their number")
    if shape[rows.axis] != rows.size or rows.outer.counted or rows.inner.counted:
        raise Dependent("the dimension of the rows is not a multiple of their number")
    return Value(shape, rows)


def free(dims: Sequence[Expression] | None = None) -> Value:
    """Return a value that does not depend on rows; it is counted if a dimension depends on their number."""
    shape = None if dims is None else tuple(dims)
    return Value(shape, counted=shape is not None and any(size.counted for size in shape))


def counted(dims: Sequence[Expression] | None = None) -> Value:
    """Return a value that depends on the number of rows."""
    return Value(None if dims is None else tuple(dims), counted=True)


def known(content: Content) -> Value:
    """Return a value with known elements."""
    dims = tuple(number(size) for size in content.shape)
    return Value(dims, counted=any(depends_on_count(element) for element in content.flat), content=content)


def depends_on_count(element: Element) -> bool:
    """Return whether an element depends on the number of rows."""
    if isinstance(element, Expression):
        return element.counted
    if isinstance(element, Real):
        return element.integer.counted
    return element is Unknown.COUNTED


def contents(elements: Sequence[Element]) -> Content:
    """Return a content with one axis."""
    array = np.empty(len(elements), object)
    for index, element in enumerate(elements):
        array[index] = element
    return array


#: element types whose arithmetic the analysis follows
_FOLLOWED = frozenset({"int64", "int32", "bool", "float32", "float64"})


def stored(array: np.ndarray[Any, Any]) -> Content:
    """Return the content of a constant; its elements are unknown if the analysis does not follow their type."""
    result = np.empty(array.shape, object)
    if array.dtype.name not in _FOLLOWED:
        result.fill(Unknown.FREE)
        return result
    whole = array.dtype.kind in "bi"
    for index, element in enumerate(array.flat):
        result.flat[index] = number(int(element)) if whole else float(element)
    return result
