"""The abstract interpreter: walks a graph once, in order, and records what is known about each value.

prove ─> _Interpreter.graph(graph, scope) ─> for each node: functions, control flow, folding, rules ─> outputs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from millstream.plugins.proof import control, row_numbers
from millstream.plugins.proof.expression import ONE, ROWS, Symbols, TooLarge, number
from millstream.plugins.proof.folding import fold
from millstream.plugins.proof.node import Call
from millstream.plugins.proof.rules import RANDOM, RULES
from millstream.plugins.proof.rules.elementwise import BROADCASTING, broadcast_dims
from millstream.plugins.proof.rules.machine_learning import Texts
from millstream.plugins.proof.value import (
    CONTENT_ELEMENTS_MAX,
    AnyValue,
    Dependent,
    Mixed,
    Rows,
    Value,
    counted,
    free,
    known,
    rowed,
    stored,
)
from millstream.services.ingest.proof import Proof

#: Limit on operator applications: those in loops and functions count each time, and operators with many operands count
#: more. Real models stay far below.
NODES_MAX = 300_000
#: limit on the axes of a tensor: a graph that adds one in each node would take quadratic time
RANK_MAX = 64
#: operands, and elements of known shapes, that count as one more operator application
_OPERANDS_PER_NODE, _ELEMENTS_PER_NODE = 8, 8
#: numbers in attributes of a nested graph or function, which may be read repeatedly, that count as one more application
_LISTED_PER_NODE = 100

_MISSING_INPUT = Mixed("a function", "an input that it returns is missing")
#: limit on the nesting of graphs and functions
DEPTH_MAX = 24

#: exceptions that a malformed node may cause in a rule
_MALFORMED = (ValueError, IndexError, TypeError, KeyError, AttributeError, OverflowError, ZeroDivisionError)

#: domains in which ONNX Runtime may have its own operators, which take precedence over functions
_RUNTIME_DOMAINS = ("ai.onnx", "com.microsoft", "com.ms")

#: domains whose operators are all deterministic, except the random ones
_STANDARD = frozenset({"", "ai.onnx.ml"})

#: operators that read only the dimensions of their operand
_MEASURING = frozenset({"Shape", "Size"})

Scope = MutableMapping[str, AnyValue | None]
Attributes = Mapping[str, onnx.AttributeProto]
"""The attributes of a call of the function around a node."""


Change = Callable[[onnx.NodeProto, Sequence[AnyValue | None]], list[onnx.NodeProto]]
"""Returns what takes the place of a node, given its operands; an empty list if it stays."""


class _Exhausted(Exception):
    """The graph is too large or too deeply nested to be analysed."""


def prove(model: onnx.ModelProto, rows: Collection[str]) -> Proof:
    """Prove that row i of every output depends only on row i of the inputs, for any number of rows.

    Args:
        model: the graph; external data is not needed.
        rows: inputs whose axis 0 holds the rows; all others have the same value for all rows that run together.
    """
    try:
        return _Interpreter(model).prove(rows)
    except _MALFORMED:
        return Proof(False, "the graph", "it does not have the form that ONNX prescribes")
    except _Exhausted as reason:
        return Proof(False, "the graph", str(reason))
    except RecursionError:
        return Proof(False, "the graph", "it is nested too deeply to be analysed")


def changed_nodes(model: onnx.ModelProto, rows: Collection[str], change: Change) -> list[onnx.NodeProto]:
    """Return the nodes of the graph, each after `change`. One that ends the proof is not made."""
    interpreter = _Interpreter(model, change)
    try:
        interpreter.prove(rows)
    except (*_MALFORMED, _Exhausted, RecursionError):
        return list(model.graph.node)
    return interpreter.nodes


class _Interpreter:
    """One analysis. Implements `control.Host`.

    Args:
        change: changes nodes of the outermost graph.
    """

    def __init__(self, model: onnx.ModelProto, change: Change | None = None) -> None:
        self.symbols = Symbols()
        self._model = model
        self._nodes = 0
        self._depth = 0
        self._change = change
        self._texts = Texts(self.symbols)
        self.nodes: list[onnx.NodeProto] = []
        self._functions = {(_domain(item), item.name, item.overload): item for item in model.functions}

    def prove(self, rows: Collection[str]) -> Proof:
        graph = self._model.graph
        scope: Scope = {}
        for value in graph.input:
            entry = _input(value, rows, self.symbols)
            if isinstance(entry, Mixed) and value.name in rows:
                return Proof(False, *entry)
            scope[value.name] = entry
        missing = set(rows) - scope.keys()
        if missing or not rows:
            return Proof(False, "the graph", f"it has no input {min(missing)!r}" if missing else "no input has rows")
        outputs = self.graph(graph, scope, control.opsets(self._model.opset_import), None, frozenset(rows))
        producers = {name: _node_label(node) for node in graph.node for name in node.output}
        for tensor, value in zip(graph.output, outputs, strict=True):
            if isinstance(value, Mixed):
                return Proof(False, *value)
            if reason := _batch_defect(value):
                return Proof(
                    False, producers.get(tensor.name, f"output {tensor.name!r}"), f"output {tensor.name!r} {reason}"
                )
        return Proof(True, "", "")

    def graph(
        self,
        graph: onnx.GraphProto,
        scope: Scope,
        versions: Mapping[str, int],
        references: Attributes | None,
        rows: Collection[str] = (),
    ) -> list[AnyValue]:
        """Return the outputs of a graph; `scope` contains its inputs and captured values, and is extended."""
        self._spend(len(graph.initializer) + len(graph.sparse_initializer))
        for initializer in graph.initializer:
            if initializer.name not in rows:
                scope[initializer.name] = constant_value(initializer)
        for sparse in graph.sparse_initializer:
            if sparse.values.name in rows:
                continue
            scope[sparse.values.name] = free([number(int(size)) for size in sparse.dims])
        self.walk(graph.node, scope, versions, references)
        return [_lookup(scope, tensor.name) or _MISSING_INPUT for tensor in graph.output]

    def walk(
        self, nodes: Iterable[onnx.NodeProto], scope: Scope, versions: Mapping[str, int], references: Attributes | None
    ) -> None:
        """Add the outputs of `nodes` to `scope`. `references` is None outside of functions."""
        self._depth += 1
        if self._depth > DEPTH_MAX:
            raise _Exhausted("it is nested too deeply to be analysed")
        for node in nodes:
            outputs = self._node(node, scope, versions, references)
            if self._change is not None and self._depth == 1:
                outputs = self._changed(self._change, node, outputs, scope, versions)
            scope.update((name, value) for name, value in zip(node.output, outputs, strict=False) if name)
        self._depth -= 1

    def _changed(
        self,
        change: Change,
        node: onnx.NodeProto,
        outputs: Sequence[AnyValue],
        scope: Scope,
        versions: Mapping[str, int],
    ) -> Sequence[AnyValue]:
        """Note the node, or what takes its place. Returns its outputs."""
        operands = [_lookup(scope, name) if name else None for name in node.input]
        replacement = change(node, operands)
        changed: Sequence[AnyValue] = outputs
        for other in replacement:
            changed = self._node(other, scope, versions, None)
            scope.update(zip(other.output, changed, strict=False))
        if any(isinstance(value, Mixed) for value in changed) and not any(
            isinstance(value, Mixed) for value in operands
        ):
            replacement, changed = [], outputs
        self.nodes += replacement or [node]
        return changed

    def _numbers_in(self, attributes: Attributes) -> int:
        """Return how many numbers the attributes contain, if they may be read repeatedly; else 0."""
        if self._depth == 1:
            return 0
        return sum(len(item.ints) + len(item.floats) + len(item.strings) for item in attributes.values())

    def _spend(self, nodes: int) -> None:
        self._nodes += nodes
        if self._nodes > NODES_MAX:
            raise _Exhausted(f"it applies more than {NODES_MAX} operators")

    def _node(
        self, node: onnx.NodeProto, scope: Scope, versions: Mapping[str, int], references: Attributes | None
    ) -> Sequence[AnyValue]:
        """Return the outputs of one node, as many as it names."""
        count = len(node.output)
        self._spend(1 + (len(node.input) + count) // _OPERANDS_PER_NODE)
        inputs = [None if not name else _lookup(scope, name) for name in node.input]
        counts = self._follow_texts(node, inputs)
        if counts is not None:
            return [counts] * count
        for value in inputs:
            if isinstance(value, Mixed):
                return [value] * count
        try:
            attributes = resolved(node, references)
            domain = _domain(node)
            operands = [value for value in inputs if not isinstance(value, Mixed)]
            known_elements = sum(value.content.size for value in operands if value and value.content is not None)
            self._spend(known_elements // _ELEMENTS_PER_NODE + self._numbers_in(attributes) // _LISTED_PER_NODE)
            call = Call(node.op_type, domain, versions.get(domain, 1), attributes, operands, count, self.symbols)
            outputs = self._apply(call, node, control.Context(self, scope, versions, references))
        except Dependent as reason:
            return [Mixed(_node_label(node), str(reason))] * count
        except TooLarge:
            return [Mixed(_node_label(node), "the sizes of its operands are too large an expression")] * count
        except _MALFORMED:
            return [Mixed(_node_label(node), "it does not have the form that its operator has")] * count
        if len(outputs) < count:
            return [Mixed(_node_label(node), "it has more outputs than its operator")] * count
        if any(isinstance(value, Value) and (value.rank or 0) > RANK_MAX for value in outputs):
            return [Mixed(_node_label(node), f"a tensor has more than {RANK_MAX} axes")] * count
        return outputs[:count]

    def _follow_texts(self, node: onnx.NodeProto, inputs: Sequence[AnyValue | None]) -> Value | None:
        if self._depth != 1 or (_domain(node), node.op_type, node.overload) in self._functions:
            return None
        first = inputs[0] if inputs else None
        return self._texts.follow(node, None if isinstance(first, Mixed) else first)

    def _apply(self, call: Call, node: onnx.NodeProto, context: control.Context) -> Sequence[AnyValue]:
        local = self._functions.get((call.domain, node.op_type, node.overload))
        if local is not None:
            if call.domain.startswith(_RUNTIME_DOMAINS) or call.domain in RULES:
                raise Dependent("a function of the model has the name of a standard operator")
            imported = control.opsets(self._model.opset_import)  # the versions that the runtime takes
            if any(
                imported.get(domain, version) != version
                for domain, version in control.opsets(local.opset_import).items()
            ):
                raise Dependent("the function and the model import different versions of operators")
            return control.expand(self, local, call)
        if call.domain == "" and call.op in control.RULES:
            return control.RULES[call.op](call, context)
        if call.op == "Constant" and call.domain == "":
            return [_constant(call)]
        return fold(call) or row_numbers.follow(call) or self._apply_rule(call)

    def _apply_rule(self, call: Call) -> Sequence[AnyValue]:
        rule = RULES.get(call.domain, {}).get(call.op)
        values = [value for value in call.inputs if value is not None]
        if not any(value.rows is not None for value in values):
            return self._without_rows(call)
        for index, value in enumerate(call.inputs):
            if value is not None and value.counted and (rule is None or index not in rule.shapes):
                raise Dependent("it computes with the number of rows")
        if rule is not None:
            return rule.apply(call)
        return control.expand_schema(self, call)

    def _without_rows(self, call: Call) -> Sequence[AnyValue]:
        """Return the outputs if no operand has rows: they have none, unless a shape repeats a value for each row."""
        if call.op in RANDOM or (call.op == "Dropout" and RULES[""]["Dropout"].apply(call) is None):
            raise Dependent("its output is random")
        rule = RULES.get(call.domain, {}).get(call.op)
        if rule is None and call.domain not in _STANDARD:
            raise Dependent("this operator is not known")
        if call.op == "Range" and (numbers := row_numbers.numbers(call)) is not None:
            return [numbers]
        depends = [index for index, value in enumerate(call.inputs) if value is not None and value.counted]
        if rule is not None and all(index in rule.shapes for index in depends):
            with suppress(Dependent, *_MALFORMED):
                outputs = rule.apply(call)
                keep = not depends or call.op in _MEASURING
                return [value if keep or not value.free else counted(value.dims) for value in outputs]
        if depends and call.domain == "" and call.op in BROADCASTING:
            with suppress(Dependent, *_MALFORMED):
                return broadcast_dims(call)
        return [counted() if depends else free()] * call.outputs


def _domain(item: onnx.NodeProto | onnx.FunctionProto) -> str:
    """Return the domain of a node or function; both names of the ONNX domain become ""."""
    return "" if item.domain == "ai.onnx" else str(item.domain)


def resolved(node: onnx.NodeProto, references: Attributes | None) -> dict[str, onnx.AttributeProto]:
    """Return the attributes of a node, with references to attributes of the enclosing function resolved.

    Raises Dependent for a reference outside of a function.
    """
    attributes: dict[str, onnx.AttributeProto] = {}
    for attribute in node.attribute:
        if not attribute.ref_attr_name:
            attributes[attribute.name] = attribute
        elif references is None:
            raise Dependent(f"its attribute {attribute.name!r} refers to a function, but it is not in one")
        elif attribute.ref_attr_name in references:
            attributes[attribute.name] = references[attribute.ref_attr_name]
    return attributes


def constant_value(tensor: TensorProto) -> Value:
    """Return the value of a stored tensor, with its content if it is small. Raises ValueError if it is malformed."""
    if any(size < 0 for size in tensor.dims):
        raise ValueError("a negative size")
    dims = [number(int(size)) for size in tensor.dims]
    elements = math.prod(tensor.dims)
    if tensor.data_location == TensorProto.EXTERNAL or elements > CONTENT_ELEMENTS_MAX:
        return free(dims)
    if tensor.data_type == TensorProto.STRING:
        return free(dims)
    return known(stored(numpy_helper.to_array(tensor)))


def _constant(call: Call) -> Value:
    tensor = call.attribute("value", None)
    if tensor is not None:
        return constant_value(tensor)
    for name in ("value_int", "value_ints", "value_float", "value_floats"):
        value = call.attribute(name, None)
        if value is not None:
            array = np.asarray(value, np.int64 if "int" in name else np.float32)
            return known(stored(array)) if array.size <= CONTENT_ELEMENTS_MAX else free([number(array.size)])
    return free([] if call.attribute("value_string", None) is not None else None)


def _input(value: onnx.ValueInfoProto, rows: Collection[str], symbols: Symbols) -> AnyValue:
    label = f"input {value.name!r}"
    if value.type.WhichOneof("value") != "tensor_type":
        return Mixed(label, "it is not a tensor")
    declared = value.type.tensor_type
    sizes = [int(dim.dim_value) if dim.WhichOneof("value") == "dim_value" else 0 for dim in declared.shape.dim]
    dims = [number(size) if size > 0 else symbols.fresh() for size in sizes]
    if value.name not in rows:
        return free(dims if declared.HasField("shape") else None)
    if not dims:
        return Mixed(label, "it has no axis for rows")
    if sizes[0] > 0:
        return Mixed(label, f"its first dimension is fixed at {sizes[0]}")
    return rowed([ROWS, *dims[1:]], Rows(0))


def _batch_defect(value: Value) -> str:
    """Return why a value does not have exactly one element on axis 0 per row; "" if it has."""
    if value.rows is None:
        return "depends on the number of rows, not on their data" if value.counted else "is the same for any rows"
    if value.rows.axis != 0:
        return f"has its rows on axis {value.rows.axis}, not on axis 0"
    return "" if value.rows.outer == value.rows.inner == ONE else "has several elements on axis 0 for each row"


def _lookup(scope: Scope, name: str) -> AnyValue | None:
    """Return a value by its name; None for an operand of a function that its caller omits."""
    try:
        return scope[name]
    except KeyError:
        return Mixed(f"value {name!r}", "nothing in the graph computes it before it is used")


def _node_label(node: onnx.NodeProto) -> str:
    operator = f"{node.domain}.{node.op_type}" if node.domain not in {"", "ai.onnx", "ai.onnx.ml"} else node.op_type
    return f'{operator} (node "{node.name}")' if node.name else f"{operator} (which computes {node.output[0]!r})"
