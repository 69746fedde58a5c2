"""Proves from an ONNX graph that a library which computes with narrower types still gives the version's answers. Pure.

prove ─> types and shapes ─> what uses demand of values (backward) ─> ranges of values (forward) ─> all fit? ─> Proof

OpenVINO's CPU plug-in keeps INT64 in 32 bits, and computes most operators of integers of every width in FP32: products
wrap, and numbers beyond 2^24 compare as equal. So an integer must be proven small where an operator computes with it.

A value is small because its range is known (constants, sizes, comparisons, arithmetic of such), or because the version
itself fails with a larger one: as an index beyond its dimension, or a size that no memory holds. Inputs are as small as
the proof needs them; `Proof.bounds` says so, and a worker runs other inputs with the version's own file.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.inliner import inline_local_functions

from millstream.plugins.compile.candidate import DIMENSION_MAX, Bounds, Narrowing
from millstream.plugins.compile.ranges import (
    FIXED,
    MOVES,
    RULES,
    SIZE,
    SIZE_MAX,
    UNKNOWN,
    Range,
    attribute,
    moved,
    summed,
)

#: Initializers with more bytes are dropped before shapes are inferred, which copies the model.
_INFERRED_BYTES_MAX = 1 << 16

_INTEGERS = {
    getattr(TensorProto, name): (int(np.iinfo(name.lower()).min), int(np.iinfo(name.lower()).max))
    for name in ("INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64")
} | {TensorProto.BOOL: (0, 1)}
#: What a malformed graph may raise.
_MALFORMED = (
    ValueError, IndexError, TypeError, KeyError, AttributeError, OverflowError, ZeroDivisionError, RuntimeError,
    onnx.checker.ValidationError, onnx.shape_inference.InferenceError,
)  # fmt: skip
_FINITE = float(np.finfo(np.float32).max)
_WIDE = frozenset({TensorProto.INT32, TensorProto.INT64})
_FLOATS = frozenset({TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE})


class Proof(NamedTuple):
    """What a proof showed.

    Args:
        why: an operator whose values may not fit, worded to follow a name; empty: all fit.
        bounds: of inputs, within which the proof holds.
    """

    why: str
    bounds: Bounds


class _Unproven(Exception):
    """The values of an operator may not fit. The message says which."""


#: Operators that move elements and drop none: what uses demand of the output holds for the operand.
_KEEPS = frozenset({"Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Concat"})
#: Operators that saturate in types of 8 and 16 bits, by the standard.
_QUANTIZING = frozenset({"QuantizeLinear", "DynamicQuantizeLinear", "QLinearConv", "QLinearMatMul"})
#: Operands that are indices: the version fails with one beyond the dimension.
_INDICES = dict.fromkeys(("Gather", "GatherElements", "GatherND", "Scatter", "ScatterElements", "ScatterND"), 1)
#: Operands that are sizes: the version fails with one that no memory holds.
_SIZES = {"Reshape": (1,), "Expand": (1,), "ConstantOfShape": (0,), "Tile": (1,), "Resize": (3,), "OneHot": (1,)}
#: Operands that say where or how much, which libraries read as 64-bit integers or clip to the size.
_PARAMETERS = {
    "Slice": (1, 2, 3, 4), "Pad": (1, 3), "TopK": (1,), "Split": (1,), "Squeeze": (1,), "Unsqueeze": (1,),
    "CumSum": (1,), "Trilu": (1,), "Compress": (1,), "NonMaxSuppression": (2,), "ReverseSequence": (1,),
    **dict.fromkeys(("ReduceSum", "ReduceMax", "ReduceMin", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2"), (1,)),
}  # fmt: skip
#: Operators of sizes whose results, up to the largest size, are exact in 32 bits wherever they were tried.
_PRODUCTS = frozenset({"Add", "Mul", "ReduceProd", "Size"})


def prove_file(path: Path, narrowing: Narrowing) -> Proof:
    """Prove it of a file, whose external data is not read: weights are no integers that a graph computes with."""
    return prove(onnx.load(str(path), load_external_data=False), narrowing)


def prove(model: onnx.ModelProto, narrowing: Narrowing) -> Proof:
    """Prove that all values of a graph fit into the types that a library computes with.

    Inputs that are only moved, or cast to floating point, may be as large as the library keeps them; where that proves
    nothing, as large as it computes exactly.
    """
    try:
        if model.functions:
            model = inline_local_functions(model)
        inferred = _inferred(model)
        first = ""
        for limit in sorted({narrowing.carried, narrowing.computed}, reverse=True):
            analysis = _Analysis(model.graph, inferred, narrowing, limit)
            try:
                analysis.run()
                return Proof("", analysis.bounds)
            except _Unproven as unproven:
                first = first or str(unproven)
    except _MALFORMED as error:
        return Proof(f"the graph cannot be analysed: {error}", {})
    return Proof(first, {})


def _inferred(model: onnx.ModelProto) -> Sequence[onnx.ValueInfoProto]:
    """Return the types and shapes of values as ONNX infers them, not as the model declares them."""
    light = onnx.ModelProto()
    light.CopyFrom(model)
    del light.graph.value_info[:]
    for tensor in light.graph.initializer:
        if len(tensor.raw_data) > _INFERRED_BYTES_MAX:
            tensor.ClearField("raw_data")
    return list(onnx.shape_inference.infer_shapes(light).graph.value_info)


class _Analysis:
    """One walk over a graph with inputs up to `limit`. Raises _Unproven."""

    def __init__(
        self, graph: onnx.GraphProto, inferred: Iterable[onnx.ValueInfoProto], narrowing: Narrowing, limit: int
    ) -> None:
        self._graph = graph
        self._inferred = inferred
        self._narrowing = narrowing
        self._limit = limit
        self._types: dict[str, int] = {}
        self._dims: dict[str, list[int]] = {}  # 0: not known; absent: not even their number
        self._constants: set[str] = set()
        self._used = {info.name for info in graph.output}
        self._demanded: dict[str, int] = {}  # value -> magnitude beyond which the version fails
        self._ranges: dict[str, Range] = {}
        self.bounds: Bounds = {}

    def run(self) -> None:
        graph = self._graph
        self._declare()
        nodes = []
        for node in reversed(graph.node):
            if not self._used.isdisjoint(node.output):  # libraries do not compute others
                self._used.update(node.input)
                self._demand(node)
                nodes.append(node)
        for info in graph.input:
            if info.name not in self._constants:
                self._enter(info.name)
        for node in reversed(nodes):
            self._node(node)

    def _declare(self) -> None:
        """Take in types, shapes and constants. A declared shape of an output may be anything."""
        graph = self._graph
        for info in (*self._inferred, *graph.input, *graph.output):
            self._types[info.name] = info.type.tensor_type.elem_type
        for info in (*self._inferred, *graph.input):
            if info.type.tensor_type.HasField("shape"):
                self._dims[info.name] = [int(dim.dim_value) for dim in info.type.tensor_type.shape.dim]
        for tensor in graph.initializer:
            self._store(tensor.name, tensor)
        for sparse in graph.sparse_initializer:
            self._store(sparse.values.name, sparse.values)

    def _store(self, name: str, tensor: TensorProto) -> None:
        """Take in a constant."""
        self._types[name], self._dims[name] = tensor.data_type, list(tensor.dims)
        self._constants.add(name)
        whole = tensor.data_type in _INTEGERS
        external = tensor.data_location == TensorProto.EXTERNAL
        if external or not (whole or (tensor.data_type in _FLOATS and math.prod(tensor.dims) <= 1)):
            self._ranges[name] = self._any(name)
            return
        array = numpy_helper.to_array(tensor)
        kind = int if whole else float
        self._ranges[name] = Range(kind(array.min()), kind(array.max())) if array.size else Range(0, 0)

    def _enter(self, name: str) -> None:
        """Take in an input: its range is what the type, its uses and the limit allow."""
        kind = self._types[name]
        if kind not in _INTEGERS:
            self._ranges[name] = UNKNOWN
            if kind in _FLOATS:  # so that all inputs have bounds, and with them a limit on their dimensions
                self.bounds[name] = (-_FINITE, _FINITE)
            return
        found = self._any(name).within(self._demanded.get(name, SIZE_MAX)).within(self._limit)
        self._ranges[name] = found
        if found != Range(*_INTEGERS[kind]):
            self.bounds[name] = (int(found.low), int(found.high))

    def _any(self, name: str) -> Range:
        """Return the range of a type."""
        return Range(*_INTEGERS[self._types[name]]) if self._types.get(name) in _INTEGERS else UNKNOWN

    def _demand(self, node: onnx.NodeProto) -> None:
        """Note what an operator demands of its operands, as indices, as sizes, or for those that use its output."""
        if (at := _INDICES.get(node.op_type)) is not None and len(node.input) > at:
            self._lower(node.input[at], self._dimension(node))
        for at in _SIZES.get(node.op_type, ()):
            if len(node.input) > at:
                self._lower(node.input[at], SIZE_MAX)
        demanded = self._demanded.get(node.output[0]) if node.output else None
        widens = self._casts_integers(node) and self._types[node.output[0]] in _WIDE
        if demanded is not None and (node.op_type in _KEEPS or widens):
            for name in node.input if node.op_type == "Concat" else node.input[:1]:
                self._lower(name, demanded)

    def _lower(self, name: str, limit: int) -> None:
        self._demanded[name] = min(limit, self._demanded.get(name, limit))

    def _casts_integers(self, node: onnx.NodeProto) -> bool:
        return node.op_type == "Cast" and all(self._types.get(one) in _INTEGERS for one in (*node.input, *node.output))

    def _dimension(self, node: onnx.NodeProto) -> int:
        """Return the largest dimension that the indices of an operator may name."""
        dims = self._dims.get(node.input[0], [])
        axis = attribute(node, "axis", 0)
        if node.op_type in {"GatherND", "ScatterND"}:
            return max(dims) if dims and all(dims) else DIMENSION_MAX
        return dims[axis] if -len(dims) <= axis < len(dims) and dims[axis] else DIMENSION_MAX

    def _node(self, node: onnx.NodeProto) -> None:
        """Find the ranges of an operator's outputs. Raises _Unproven if an operand or an output may not fit."""
        if any(attribute.HasField("g") or attribute.graphs for attribute in node.attribute):
            raise _Unproven(f"{_label(node)} has a graph inside it, which is not followed")
        if node.op_type == "Constant":
            self._store(node.output[0], _constant(node))
            return
        if not self._narrowing.doubles:
            self._check_doubles(node)
        moves = node.op_type in MOVES or node.op_type in {"Cast", "CastLike", "DequantizeLinear"}
        limit = self._narrowing.carried if moves else self._narrowing.computed
        for at, name in enumerate(node.input):
            exempt = at in _PARAMETERS.get(node.op_type, ()) or at == _INDICES.get(node.op_type)
            if name and not exempt and at not in _SIZES.get(node.op_type, ()):
                self._check(node, name, limit)
        for name, found in zip(node.output, self._outputs(node), strict=False):
            if name not in self._used:
                continue
            if self._types.get(name) in _INTEGERS:
                found = self._fitting(node, name, found)
            self._ranges[name] = found
            demanded = self._demanded.get(name, 0) if node.op_type in _PRODUCTS else 0
            self._check(node, name, max(limit, demanded))

    def _fitting(self, node: onnx.NodeProto, name: str, found: Range) -> Range:
        """Return the range of an integer output with what uses demand.

        Numbers that wrap or saturate in their own type are not known, except where libraries agree on them.
        """
        kind = self._types[name]
        if (demanded := self._demanded.get(name)) is not None:
            found = found.within(demanded)
        least, greatest = _INTEGERS[kind]
        if least <= found.low and found.high <= greatest:
            return found
        agreed = kind == TensorProto.BOOL or node.op_type in _QUANTIZING or self._casts_integers(node)
        return Range(least, greatest) if agreed else UNKNOWN

    def _check(self, node: onnx.NodeProto, name: str, limit: int) -> None:
        """Raise _Unproven if integers of a value may be larger than `limit`."""
        kind = self._types.get(name)
        if not kind:
            raise _Unproven(f"the datatype of {name!r} at {_label(node)} is not known")
        if kind in _INTEGERS and self._ranges.get(name, self._any(name)).magnitude > limit:
            raise _Unproven(f"integers of {name!r} at {_label(node)} may be larger than {limit}")

    def _check_doubles(self, node: onnx.NodeProto) -> None:
        """Raise _Unproven if an operator computes in FP64. A constant, or a cast, may become FP32 on its way."""
        kinds = [self._types.get(name) for name in (*node.input, *node.output) if name]
        to_single = node.op_type == "Cast" and attribute(node, "to", 0) in {TensorProto.FLOAT, TensorProto.DOUBLE}
        if TensorProto.DOUBLE in kinds and not to_single and node.op_type not in MOVES:
            raise _Unproven(f"{_label(node)} computes with FP64")

    def _outputs(self, node: onnx.NodeProto) -> Sequence[Range]:
        """Return the ranges of the outputs, before their types bound them."""
        op, ranges = node.op_type, [self._ranges.get(name, UNKNOWN) for name in node.input]
        count = len(node.output)
        if node.domain not in {"", "ai.onnx"}:
            return [UNKNOWN] * count
        if op in MOVES:
            return [moved(node, ranges)] * count
        if op in FIXED:
            return [FIXED[op]] * count
        if op in {"TopK", "Unique"}:
            return [ranges[0], *[SIZE] * 3]
        if op in {"ReduceSum", "CumSum"}:
            return [summed(ranges[0], self._summands(node))]
        rule = RULES.get(op)
        if rule is None or (UNKNOWN in ranges and op != "Cast"):  # a float that is not known may be NaN
            return [UNKNOWN] * count
        return [rule(node, ranges, self._types.get(node.output[0]) in _INTEGERS)]

    def _summands(self, node: onnx.NodeProto) -> int:
        """Return how many elements a sum has at most."""
        dims = self._dims.get(node.input[0])
        return SIZE_MAX if dims is None else math.prod(size or DIMENSION_MAX for size in dims)


def _constant(node: onnx.NodeProto) -> TensorProto:
    """Return the tensor of a Constant."""
    [attribute] = node.attribute
    value = helper.get_attribute_value(attribute)
    if isinstance(value, TensorProto):
        return value
    return numpy_helper.from_array(np.asarray(value, np.int64 if "int" in attribute.name else np.float32))


def _label(node: onnx.NodeProto) -> str:
    return f"{node.op_type} (which computes {node.output[0]!r})" if node.output else node.op_type
