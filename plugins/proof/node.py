"""An application of an operator, in the form that the rules work on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import onnx

from millstream.plugins.proof.expression import Expression, Symbols
from millstream.plugins.proof.value import Content, Dependent, Value


class Call:
    """An operator with abstract operands.

    Args:
        version: of the operator's domain, as the model imports it.
        inputs: the operands; None for an optional one that is absent.
        outputs: the number of outputs that the node names.
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
        """Return the same call with other operands."""
        return Call(self.op, self.domain, self.version, self.attributes, inputs, self.outputs, self.symbols)

    def optional(self, index: int) -> Value | None:
        """Return an operand, or None if it is absent."""
        return self.inputs[index] if index < len(self.inputs) else None

    def input(self, index: int) -> Value:
        """Return an operand. Raises Dependent if it is absent."""
        value = self.optional(index)
        if value is None:
            raise Dependent("an input is missing")
        return value

    def attribute(self, name: str, default: Any) -> Any:
        """Return the value of an attribute, or `default` if it is not set."""
        attribute = self.attributes.get(name)
        return default if attribute is None else onnx.helper.get_attribute_value(attribute)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return an attribute that is 0 or 1. Raises Dependent for others, which operators interpret differently."""
        value = self.attribute(name, int(default))
        if value not in (0, 1):
            raise Dependent(f"its attribute {name!r} is neither 0 nor 1")
        return bool(value)

    def axis(self, rank: int, default: int, name: str = "axis") -> int:
        """Return the axis that an attribute names, from 0 to rank - 1."""
        return normalized(int(self.attribute(name, default)), rank)

    def only_rowed(self, *positions: int) -> None:
        """Raise Dependent if an operand other than those at `positions` has rows."""
        for index, value in enumerate(self.inputs):
            if value is not None and index not in positions and value.rows is not None:
                raise Dependent(f"input {index} of the operator is computed from rows")

    def integers(self, index: int, attribute: str) -> list[int] | None:
        """Return constant integers from an operand, or from the attribute that preceded it in older opsets.

        None if both are absent. Raises Dependent if the values are not known.
        """
        value = self.optional(index)
        if value is None:
            items = self.attribute(attribute, None)
            return None if items is None else [int(item) for item in ([items] if isinstance(items, int) else items)]
        return [constant(element) for element in known_content(value).flat]

    def sizes(self, index: int) -> list[Any]:
        """Return the elements of an operand of integers. Raises Dependent if it has rows or its content is unknown."""
        return list(known_content(self.input(index)).flat)


def known_content(value: Value) -> Content:
    """Return the content of a value. Raises Dependent if it has rows or its content is unknown."""
    if value.rows is not None:
        raise Dependent("a shape, an index or a count is computed from rows")
    if value.content is None:
        raise Dependent("the values of a shape, an index or a count are not known")
    return value.content


def constant(element: object) -> int:
    """Return the integer of an element. Raises Dependent if it is not a constant."""
    value = element.constant if isinstance(element, Expression) else None
    if value is None:
        raise Dependent("an axis, an index or a size is not a constant")
    return value


def normalized(axis: int, rank: int) -> int:
    """Return the axis counted from the front. Raises Dependent if it is out of range."""
    if not -rank <= axis < rank:
        raise Dependent("an axis is out of range")
    return axis % rank


def dims_of(value: Value) -> tuple[Expression, ...]:
    """Return the dimensions of a value. Raises Dependent if its rank is unknown."""
    if value.dims is None:
        raise Dependent("the rank of an input is not known")
    return value.dims


def unknown_dims(call: Call, rank: int) -> list[Expression]:
    """Return `rank` unknown dimensions that do not depend on the number of rows."""
    return [call.symbols.fresh() for _ in range(rank)]


class Rule(NamedTuple):
    """How an operator treats rows.

    Args:
        apply: returns the outputs (those beyond the node's are dropped), or raises Dependent.
        shapes: positions of operands that may depend on the number of rows, since `apply` evaluates their contents;
            all other operands must not.
    """

    apply: Callable[[Call], list[Value]]
    shapes: frozenset[int] = frozenset()


Rules = dict[str, Rule]


def always_dependent(reason: str) -> Callable[[Call], list[Value]]:
    """Return a rule that always ends the proof with `reason`."""

    def apply(_call: Call) -> list[Value]:
        raise Dependent(reason)

    return apply
