"""Interprets nodes with graphs of their own: If, Loop, Scan, and functions of the model and of the ONNX standard.

Conditions and iteration counts must not depend on rows. An attribute of a function's body may refer to an attribute of
the call (ONNX IR specification, "Functions").

The body of a loop is interpreted until the abstract values that it carries between iterations no longer change. A
symbol for a dimension that changes between iterations is not used outside the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx

from millstream.plugins.proof.expression import ONE, ROWS, Expression, Symbols
from millstream.plugins.proof.node import Call, dims_of, normalized
from millstream.plugins.proof.value import AnyValue, Content, Dependent, Mixed, Value, free, rowed

Scope = MutableMapping[str, AnyValue | None]
Attributes = Mapping[str, onnx.AttributeProto]

#: limit on the passes over the body of a loop; each pass widens the values that changed, so few are needed
_PASSES_MAX = 6


class Host(Protocol):
    """The part of the interpreter that nodes with graphs need."""

    symbols: Symbols

    def graph(
        self, graph: onnx.GraphProto, scope: Scope, versions: Mapping[str, int], references: Attributes | None
    ) -> list[AnyValue]: ...

    def walk(
        self, nodes: Iterable[onnx.NodeProto], scope: Scope, versions: Mapping[str, int], references: Attributes | None
    ) -> None: ...


class Context:
    """The surroundings of a node with graphs: the scope of its graphs, and the interpreter that runs them."""

    def __init__(self, host: Host, scope: Scope, versions: Mapping[str, int], references: Attributes | None) -> None:
        self.symbols = host.symbols
        self._host = host
        self._scope = scope
        self._versions = versions
        self._references = references

    def run(self, graph: onnx.GraphProto, inputs: Sequence[AnyValue]) -> list[AnyValue]:
        """Return the outputs of a graph of the node for these inputs."""
        if len(inputs) != len(graph.input):
            raise Dependent("its graph has another number of inputs")
        inner: Scope = _Nested(self._scope)
        for tensor, value in zip(graph.input, inputs, strict=True):
            inner[tensor.name] = value
        return self._host.graph(graph, inner, self._versions, self._references)


class _Nested(dict[str, AnyValue | None]):
    """A nested scope, which looks up missing names in the outer scope."""

    def __init__(self, outer: Scope) -> None:
        super().__init__()
        self._outer = outer

    def __missing__(self, name: str) -> AnyValue | None:
        return self._outer[name]


def branch(call: Call, context: Context) -> list[AnyValue]:
    """Interpret If: one branch if the condition is known, else both, which must have the rows on the same axes."""
    condition = call.input(0)
    _check_control(condition, "which branch runs")
    chosen = _truth(condition)
    if chosen is not None:
        return context.run(call.attribute("then_branch" if chosen else "else_branch", None), [])
    pairs = zip(
        context.run(call.attribute("then_branch", None), []),
        context.run(call.attribute("else_branch", None), []),
        strict=True,
    )
    here = context.symbols.fresh()
    return [joined(context.symbols, a, b, (here, index)) for index, (a, b) in enumerate(pairs)]


def _check_control(value: Value, what: str) -> None:
    if value.rows is not None:
        raise Dependent(f"{what} depends on the data of rows")
    if value.counted:
        raise Dependent(f"{what} depends on the number of rows")


def _truth(condition: Value) -> bool | None:
    if condition.content is None or condition.content.size != 1:
        return None
    element = condition.content.flat[0]
    fixed = element.constant if isinstance(element, Expression) else None
    return None if fixed is None else bool(fixed)


def loop(call: Call, context: Context) -> list[AnyValue]:
    """Interpret Loop. Inputs: count, condition, state. Outputs: the last state, and one stack for each scan output."""
    for value, what in ((call.optional(0), "how often it runs"), (call.optional(1), "whether it runs")):
        if value is not None:
            _check_control(value, what)
    body = call.attribute("body", None)
    first: list[AnyValue] = [_present(value) for value in call.inputs[2:]]
    iteration, going = free([]), free([])

    def step(state: list[AnyValue]) -> list[AnyValue]:
        outputs = context.run(body, [iteration, going, *state])
        continues = outputs[0]
        if isinstance(continues, Mixed):
            raise Dependent(f"whether it continues depends on rows: {continues.culprit}: {continues.reason}")
        _check_control(continues, "whether it continues")
        return outputs[1:]

    state, scans = _repeat(context.symbols, first, step)
    return state + [_stacked(value, 0, context.symbols.fresh()) for value in scans]


def _present(value: Value | None) -> Value:
    if value is None:
        raise Dependent("an input is missing")
    return value


def _repeat(
    symbols: Symbols, first: list[AnyValue], step: Callable[[list[AnyValue]], list[AnyValue]]
) -> tuple[list[AnyValue], list[AnyValue]]:
    """Return the state after any number of iterations, and the other outputs of an iteration."""
    here, after = symbols.fresh(), symbols.fresh()
    state = first
    for _ in range(_PASSES_MAX):
        outputs = step(state)
        if len(outputs) < len(state):
            raise Dependent("its graph has too few outputs")
        widened = [
            joined(symbols, a, b, (here, index)) for index, (a, b) in enumerate(zip(state, outputs, strict=False))
        ]
        if all(_alike(a, b) for a, b in zip(state, widened, strict=True)):
            last = [
                joined(symbols, a, b, (after, index)) for index, (a, b) in enumerate(zip(first, state, strict=True))
            ]
            return last, outputs[len(state) :]
        state = widened
    raise Dependent("the values that it carries between iterations keep changing")


def scan(call: Call, context: Context) -> list[AnyValue]:
    """Interpret Scan over axes without rows (from opset 9 on)."""
    if call.version < 9:
        raise Dependent("its form of opset 8 is not supported")
    body = call.attribute("body", None)
    count = int(call.attribute("num_scan_inputs", 0))
    present = [_present(value) for value in call.inputs]
    first: list[AnyValue] = list(present[: len(present) - count])
    sliced = present[len(present) - count :]
    axes = call.attribute("scan_input_axes", [0] * count)
    items: list[AnyValue] = [_item(value, int(axis)) for value, axis in zip(sliced, axes, strict=True)]
    state, scans = _repeat(context.symbols, first, lambda state: context.run(body, [*state, *items]))
    places = call.attribute("scan_output_axes", [0] * len(scans))
    length = dims_of(sliced[0])[normalized(int(axes[0]), len(dims_of(sliced[0])))]
    return state + [_stacked(value, int(axis), length) for value, axis in zip(scans, places, strict=True)]


def _item(value: Value, axis: int) -> Value:
    """Return one element along an axis without rows."""
    if value.counted:
        raise Dependent("it computes with the number of rows")
    dims = list(dims_of(value))
    axis = normalized(axis, len(dims))
    del dims[axis]
    if value.rows is None:
        return free(dims)
    if value.rows.axis == axis:
        raise Dependent("it goes through the rows one after the other")
    return rowed(dims, value.rows.moved(value.rows.axis - (value.rows.axis > axis)))


def _stacked(value: AnyValue, axis: int, length: Expression) -> AnyValue:
    """Return the values of all iterations, stacked along a new axis."""
    if isinstance(value, Mixed):
        return value
    if value.dims is None or value.counted:
        return Value(None, counted=value.counted)
    axis = normalized(axis, len(value.dims) + 1)
    dims = [*value.dims]
    dims.insert(axis, length)
    if value.rows is None:
        return free(dims)
    return rowed(dims, value.rows.moved(value.rows.axis + (value.rows.axis >= axis)))


def joined(symbols: Symbols, one: AnyValue, other: AnyValue, key: tuple[Expression, int]) -> AnyValue:
    """Return a value that covers both: dimensions that differ become symbols identified by `key`."""
    if isinstance(one, Mixed):
        return one
    if isinstance(other, Mixed):
        return other
    if one.rows != other.rows:
        return Mixed("a Loop, Scan or If", "rows have different layouts after different paths")
    if one.dims is None or other.dims is None or len(one.dims) != len(other.dims):
        if one.rows is not None:
            return Mixed("a Loop, Scan or If", "a value has different numbers of axes after different paths")
        return Value(None, counted=one.counted or other.counted)
    dims = tuple(
        a if a == b else symbols.derived("join", *key, axis, ROWS if a.counted or b.counted else ONE)
        for axis, (a, b) in enumerate(zip(one.dims, other.dims, strict=True))
    )
    content = one.content if one.content is not None and _same(one.content, other.content) else None
    numbers = one.numbers if one.numbers == other.numbers else None
    return Value(dims, one.rows, one.counted or other.counted, content, numbers)


def _same(one: Content, other: Content | None) -> bool:
    return other is not None and one.shape == other.shape and bool(np.all(one == other))


def _alike(one: AnyValue, other: AnyValue) -> bool:
    if isinstance(one, Mixed) or isinstance(other, Mixed):
        return isinstance(one, Mixed) and isinstance(other, Mixed)
    if (one.dims, one.rows, one.counted, one.numbers) != (other.dims, other.rows, other.counted, other.numbers):
        return False
    if one.content is None or other.content is None:
        return one.content is other.content
    return _same(one.content, other.content)


def opsets(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    """Return the opset versions by domain; the domain of ONNX itself is ""."""
    return {"" if item.domain == "ai.onnx" else item.domain: item.version for item in imports}


def expand(host: Host, function: onnx.FunctionProto, call: Call) -> list[AnyValue]:
    """Return the outputs of a function of the model for the operands of a call."""
    references = {attribute.name: attribute for attribute in function.attribute_proto}
    references.update(call.attributes)
    return _run_function(host, function, call, references)


def expand_schema(host: Host, call: Call) -> list[AnyValue]:
    """Return the outputs of an operator that the standard defines as a function. Raises Dependent for any other."""
    try:
        schema: Any = onnx.defs.get_schema(call.op, call.version, call.domain)
    except onnx.defs.SchemaError:
        raise Dependent("this operator is not known") from None
    versions = [version for version in schema.function_opset_versions if version <= call.version]
    if not versions:
        raise Dependent("nothing is known about how this operator treats rows")
    function = onnx.FunctionProto.FromString(schema.get_function_with_opset_version(max(versions)))
    references = {
        name: attribute.default_value for name, attribute in schema.attributes.items() if attribute.default_value.name
    }
    references.update(call.attributes)
    return _run_function(host, function, call, references)


def _run_function(
    host: Host, function: onnx.FunctionProto, call: Call, references: Mapping[str, onnx.AttributeProto]
) -> list[AnyValue]:
    scope: Scope = dict.fromkeys(function.input)
    scope.update(zip(function.input, call.inputs, strict=False))
    host.walk(function.node, scope, opsets(function.opset_import), references)
    missing = Mixed("a function", "it does not compute one of its outputs")
    return [scope.get(name) or missing for name in function.output]


RULES: dict[str, Callable[[Call, Context], list[AnyValue]]] = {"If": branch, "Loop": loop, "Scan": scan}
