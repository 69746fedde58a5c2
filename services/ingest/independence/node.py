"""One application of an operator, as the rules see it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import onnx

from millstream.services.ingest.independence.expression import Expression, Symbols
from millstream.services.ingest.independence.value import Content, Dependent, Value, free


class Call:
    """An operator with abstract operands. `inputs`: None where an optional one is absent.

    `outputs`: how many the node names; `version`: of the operator's domain, as the model imports it.
    """

    __slots__ = ("attributes", "domain", "inputs", "op", "outputs", "symbols", "version")

    def __init__(
        self,
        op: str,
        domain: str,
        version: int,
        attributes: Mapping[str, onnx.AttributeProto],
        inputs: Sequence[Value | None],
        outputs: int,
        symbols: Symbols,
    ) -> None:
        self.op = op
        self.domain = domain
        self.version = version
        self.attributes = attributes
        self.inputs = inputs
        self.outputs = outputs
        self.symbols = symbols

    def with_inputs(self, inputs: Sequence[Value | None]) -> Call:
        """The same call of other operands."""
        return Call(self.op, self.domain, self.version, self.attributes, inputs, self.outputs, self.symbols)

    def optional(self, index: int) -> Value | None:
        """An operand that may be absent."""
        return self.inputs[index] if index < len(self.inputs) else None

    def input(self, index: int) -> Value:
        """An operand that must be there."""
        value = self.optional(index)
        if value is None:
            raise Dependent("an input is missing")
        return value

    def attribute(self, name: str, default: Any) -> Any:
        """The value of an attribute, `default` if it is not set."""
        found = self.attributes.get(name)
        return default if found is None else onnx.helper.get_attribute_value(found)

    def flag(self, name: str, default: bool = False) -> bool:
        """An attribute that is 0 or 1. Raises Dependent for another number: operators differ in what they take it for."""
        value = self.attribute(name, int(default))
        if value not in (0, 1):
            raise Dependent(f"its attribute {name!r} is neither 0 nor 1")
        return bool(value)

    def axis(self, rank: int, default: int, name: str = "axis") -> int:
        """The axis that an attribute names, from 0 to rank - 1."""
        return normalized(int(self.attribute(name, default)), rank)

    def only_rowed(self, *positions: int) -> None:
        """Raises Dependent if an operand other than those at `positions` has rows."""
        for index, value in enumerate(self.inputs):
            if value is not None and index not in positions and value.rows is not None:
                raise Dependent(f"input {index} of the operator is computed from rows")

    def integers(self, index: int, attribute: str) -> list[int] | None:
        """Constant integers from an operand, or from the attribute in whose place it came. None: neither is there.

        Raises Dependent if their values are not known.
        """
        value = self.optional(index)
        if value is None:
            found = self.attribute(attribute, None)
            return None if found is None else [int(item) for item in ([found] if isinstance(found, int) else found)]
        return [constant(element) for element in known_content(value).flat]

    def sizes(self, index: int) -> list[Any]:
        """The elements of an operand of integers. Raises Dependent if it is computed from rows or has no known form."""
        return list(known_content(self.input(index)).flat)


def known_content(value: Value) -> Content:
    """The content of a value. Raises Dependent if there is none."""
    if value.rows is not None:
        raise Dependent("a shape, an index or a count is computed from rows")
    if value.content is None:
        raise Dependent("the values of a shape, an index or a count are not known")
    return value.content


def constant(element: object) -> int:
    """The integer that an element is. Raises Dependent."""
    value = element.constant if isinstance(element, Expression) else None
    if value is None:
        raise Dependent("an axis, an index or a size is not a constant")
    return value


def normalized(axis: int, rank: int) -> int:
    """An axis counted from the front. Raises Dependent if there is none."""
    if not -rank <= axis < rank:
        raise Dependent("an axis is out of range")
    return axis % rank


def dims_of(value: Value) -> tuple[Expression, ...]:
    """The dimensions of a value. Raises Dependent if the rank is not known."""
    if value.dims is None:
        raise Dependent("the rank of an input is not known")
    return value.dims


def unknown_dims(call: Call, rank: int) -> list[Expression]:
    """Dimensions of which nothing is known but that they do not depend on the rows."""
    return [call.symbols.fresh() for _ in range(rank)]


def frees(call: Call) -> list[Value]:
    """Free outputs of unknown shape."""
    return [free() for _ in range(call.outputs)]


class Rule(NamedTuple):
    """What an operator does to rows.

    `apply` returns the outputs (those beyond the node's are dropped) or raises Dependent. `shapes`: the operands that
    may depend on the number of rows, because `apply` looks at what they hold; all others must not.
    """

    apply: Callable[[Call], list[Value]]
    shapes: frozenset[int] = frozenset()


Rules = dict[str, Rule]
