"""Generates random ONNX graphs for property tests of the analysis: each node runs for at least one number of rows.

Sizes are small and often equal to the number of rows, so that shapes that fit only by accident occur, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator

OPSET = 17
#: rows while a graph is built
ROWS = 3
_ELEMENTS_MAX = 4096

Array = np.ndarray[Any, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]


class Graph(NamedTuple):
    """A model, the inputs that have rows, and the shapes of these rows."""

    model: onnx.ModelProto
    inputs: dict[str, tuple[int, ...]]


class _Builder:
    """Adds nodes, and computes their values for ROWS rows to know their shapes."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []
        self.values: dict[str, Array] = {}
        self.inputs: dict[str, tuple[int, ...]] = {}

    def one_of(self, items: Sequence[Any]) -> Any:
        return self.draw(st.sampled_from(list(items)))

    def number(self, low: int, high: int) -> int:
        return int(self.draw(st.integers(low, high)))

    def value(self, kind: str = "f", rank_min: int = 0) -> str:
        """Return an earlier value, preferably a late one. Raises IndexError if there is none."""
        names = [name for name, array in self.values.items() if array.dtype.kind == kind and array.ndim >= rank_min]
        if not names:
            raise IndexError(kind)
        return str(self.one_of(names[-4:] if self.number(0, 3) else names))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.values[name].shape)

    def axis(self, name: str) -> int:
        rank = self.values[name].ndim
        return self.number(-rank, rank - 1)

    def integers(self, items: Sequence[int] | int) -> str:
        return self.constant(np.asarray(items, np.int64))

    def floats(self, shape: Sequence[int]) -> str:
        count = int(np.prod(shape))
        return self.constant((np.arange(1, count + 1, dtype=np.float32).reshape(shape) % 7 - 3) / 4)

    def constant(self, array: Array) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        self.values[name] = array
        return name

    def add(
        self, op: str, inputs: Sequence[str], outputs: int = 1, captured: Sequence[str] = (), **attributes: Any
    ) -> str:
        """Add a node and return its first output. Raises as the reference implementation does if it does not run."""
        names = [f"v{len(self.values)}_{index}" for index in range(outputs)]
        node = helper.make_node(op, list(inputs), names, **attributes)
        feeds = {name: self.values[name] for name in (*inputs, *captured) if name}
        with np.errstate(all="ignore"):
            results: Any = ReferenceEvaluator(_single(node, feeds)).run(None, feeds)
        if any(not isinstance(result, np.ndarray) or result.size > _ELEMENTS_MAX for result in results):
            raise ValueError("too large")
        self.nodes.append(node)
        self.values.update(zip(names, results, strict=True))
        return names[0]


def _single(node: onnx.NodeProto, feeds: dict[str, Array]) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(a.dtype), None) for n, a in feeds.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(name) for name in node.output]
    graph = helper.make_graph([node], "node", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)


def _unary(b: _Builder) -> None:
    b.add(b.one_of(["Relu", "Neg", "Tanh", "Abs", "Identity", "Sigmoid", "Floor"]), [b.value()])


def _binary(b: _Builder) -> None:
    b.add(b.one_of(["Add", "Sub", "Mul", "Max"]), [b.value(), b.value()])


def _weighted(b: _Builder) -> None:
    x = b.value()
    shape = [b.one_of([1, size]) for size in b.shape(x)][b.number(0, len(b.shape(x))) :]
    b.add(b.one_of(["Add", "Mul", "Div"]), [x, b.floats(shape)])


def _matmul(b: _Builder) -> None:
    x = b.value(rank_min=1)
    other = b.floats([b.shape(x)[-1], b.number(1, 4)]) if b.number(0, 1) else b.value(rank_min=1)
    b.add("MatMul", [x, other] if b.number(0, 3) else [other, x])


def _gemm(b: _Builder) -> None:
    trans = b.number(0, 1), b.number(0, 1)
    extra = [b.value()] if b.number(0, 1) else []
    b.add("Gemm", [b.value(rank_min=2), b.value(rank_min=2), *extra], transA=trans[0], transB=trans[1])


def _einsum(b: _Builder) -> None:
    equation = b.one_of(
        ["ij,ij->ij", "ij,kj->ik", "ij,jk->ik", "bij,bjk->bik", "bij,bij->b", "...i,...i->...", "bij->bji"]
    )
    b.add("Einsum", [b.value(rank_min=1) for _ in range(equation.count(",") + 1)], equation=equation)


def _transpose(b: _Builder) -> None:
    x = b.value(rank_min=2)
    b.add("Transpose", [x], perm=b.draw(st.permutations(range(len(b.shape(x))))))


def _reshape(b: _Builder) -> None:
    x = b.value(b.one_of("fffi"))
    sizes = list(b.shape(x))
    for _ in range(b.number(0, 2)):  # merge axes, split one, or insert a 1
        place = b.number(0, len(sizes))
        if place + 1 < len(sizes) and b.number(0, 1):
            sizes[place : place + 2] = [sizes[place] * sizes[place + 1]]
        elif place < len(sizes) and sizes[place] % 2 == 0:
            sizes[place : place + 1] = b.one_of([[2, sizes[place] // 2], [sizes[place] // 2, 2]])
        else:
            sizes.insert(place, 1)
    if b.number(0, 2) and sizes:
        sizes[b.number(0, len(sizes) - 1)] = -1
    for axis in range(min(len(sizes), len(b.shape(x)))):
        if sizes[axis] == b.shape(x)[axis] and b.number(0, 1):
            sizes[axis] = 0
    b.add("Reshape", [x, b.integers(sizes)])


def _shuffle(b: _Builder) -> None:
    """Split axes, transpose and merge them, as for windows and heads."""
    x = b.value(rank_min=2)
    sizes = list(b.shape(x))
    place = b.number(0, len(sizes) - 1)
    factor = b.one_of([1, 2, 3])
    folded = sizes[:place] + ([factor, -1] if b.number(0, 1) else [-1, factor]) + sizes[place + 1 :]
    if b.number(0, 1) and place + 1 < len(sizes):
        folded = [*sizes[:place], -1, *sizes[place + 2 :]]
    name = b.add("Reshape", [x, b.integers(folded)])
    name = b.add("Transpose", [name], perm=b.draw(st.permutations(range(len(folded)))))
    back = list(b.draw(st.permutations(sizes))) if not b.number(0, 2) else sizes
    b.add("Reshape", [name, b.integers([-1, *back[1:]])])


def _sizes(b: _Builder) -> str:
    """Add a shape that is computed from the shape of a value, and return it."""
    x = b.value(b.one_of("fi"), rank_min=1)
    shape = b.add("Shape", [x])
    for _ in range(b.number(0, 2)):
        step = b.number(0, 4)
        if step == 0:
            shape = b.add("Concat", [shape, b.integers([b.number(1, 4)])], axis=0)
        elif step == 1:
            shape = b.add("Concat", [b.integers([b.number(1, 4)]), shape], axis=0)
        elif step == 2:
            shape = b.add("Gather", [shape, b.integers([b.number(0, 1) for _ in range(b.number(1, 3))])])
        elif step == 3:
            shape = b.add("Slice", [shape, b.integers([0]), b.integers([b.number(1, 2)])])
        else:
            shape = b.add("Mul", [shape, b.integers([b.number(1, 2)])])
    return shape


def _by_shape(b: _Builder) -> None:
    op = b.one_of(["Reshape", "Expand", "ConstantOfShape", "Tile"])
    if op == "ConstantOfShape":
        b.add(op, [_sizes(b)])
    else:
        b.add(op, [b.value() if b.number(0, 2) else b.floats([1, b.number(1, 3)]), _sizes(b)])


def _count(b: _Builder) -> None:
    """Add arithmetic that uses the number of rows, or another size, as data."""
    b.add("Cast", [_sizes(b)], to=TensorProto.FLOAT)


def _softmax(b: _Builder) -> None:
    x = b.value(rank_min=1)
    b.add(b.one_of(["Softmax", "LogSoftmax", "Hardmax"]), [x], axis=b.axis(x))


def _norm(b: _Builder) -> None:
    x = b.value(rank_min=1)
    axis = b.number(0, len(b.shape(x)) - 1)
    b.add("LayerNormalization", [x, b.floats(b.shape(x)[axis:])], axis=axis)


def _reduce(b: _Builder) -> None:
    x = b.value(rank_min=1)
    op = b.one_of(["ReduceMean", "ReduceMax", "ReduceSum", "ReduceL2"])
    axes = sorted({b.axis(x) % len(b.shape(x)) for _ in range(b.number(1, 2))})
    if op == "ReduceSum":
        b.add(op, [x, b.integers(axes)], keepdims=b.number(0, 1), noop_with_empty_axes=b.number(0, 1))
    else:
        b.add(op, [x], axes=axes, keepdims=b.number(0, 1))


def _arg(b: _Builder) -> None:
    x = b.value(rank_min=1)
    b.add("ArgMax", [x], axis=b.axis(x), keepdims=b.number(0, 1))


def _to_float(b: _Builder) -> None:
    b.add("Cast", [b.value("i")], to=TensorProto.FLOAT)


def _concat(b: _Builder) -> None:
    x = b.value(rank_min=1)
    b.add("Concat", [x, b.value(rank_min=1)], axis=b.axis(x))


def _slice(b: _Builder) -> None:
    x = b.value(rank_min=1)
    bounds = (
        [b.number(-2, 2)],
        [b.one_of([1, 2, 3, -1, 1 << 16, 1 << 17, 2**62])],
        [b.axis(x)],
        [b.one_of([1, 1, 2, -1])],
    )
    b.add("Slice", [x, *(b.integers(bound) for bound in bounds)])


def _gather(b: _Builder) -> None:
    x = b.value(rank_min=1)
    if b.number(0, 1):
        indices = b.integers([b.number(0, 2) for _ in range(b.number(1, 2))] if b.number(0, 1) else b.number(0, 2))
    else:
        indices = b.add("Mod", [b.value("i"), b.integers(min(b.shape(x)) or 1)])
    b.add(b.one_of(["Gather", "GatherElements"]), [x, indices], axis=b.axis(x))


def _embed(b: _Builder) -> None:
    b.add("Gather", [b.floats([4, 2]), b.add("Mod", [b.value("i"), b.integers(4)])])


def _axes(b: _Builder) -> None:
    x = b.value(rank_min=1)
    if b.number(0, 1):
        b.add("Unsqueeze", [x, b.integers([b.number(0, len(b.shape(x)))])])
    else:
        b.add("Squeeze", [x, b.integers([b.axis(x)])] if b.number(0, 2) else [x])


def _flatten(b: _Builder) -> None:
    x = b.value(rank_min=1)
    b.add("Flatten", [x], axis=b.number(0, len(b.shape(x))))


def _running(b: _Builder) -> None:
    x = b.value(rank_min=1)
    b.add("CumSum", [x, b.integers(b.axis(x))])


def _top(b: _Builder) -> None:
    x = b.value(rank_min=1)
    b.add("TopK", [x, b.integers([b.number(1, 2)])], outputs=2, axis=b.axis(x))


def _where(b: _Builder) -> None:
    b.add("Where", [b.add("Greater", [b.value(), b.value()]), b.value(), b.value()])


def _pad(b: _Builder) -> None:
    x = b.value(rank_min=1)
    pads = [0] * (2 * len(b.shape(x)))
    pads[b.number(0, len(pads) - 1)] = 1
    b.add("Pad", [x, b.integers(pads)])


def _conv(b: _Builder) -> None:
    x = b.value(rank_min=3)
    b.add("Conv", [x, b.floats([2, b.shape(x)[1], *([1] * (len(b.shape(x)) - 2))])])


def _pool(b: _Builder) -> None:
    x = b.value(rank_min=3)
    b.add(b.one_of(["GlobalAveragePool", "GlobalMaxPool"]), [x])


def _split(b: _Builder) -> None:
    x = b.value(rank_min=1)
    b.add("Split", [x], outputs=2, axis=b.axis(x))


def _scatter(b: _Builder) -> None:
    x = b.value(rank_min=1)
    indices = b.add("Mod", [b.value("i"), b.integers(min(b.shape(x)) or 1)])
    b.add("ScatterElements", [x, indices, b.value()], axis=b.axis(x))


def _one_hot(b: _Builder) -> None:
    x = b.add("Mod", [b.value("i"), b.integers(3)])
    b.add("OneHot", [x, b.integers(3), b.floats([2])], axis=b.axis(x) if b.shape(x) else -1)


def _positions(b: _Builder) -> None:
    sizes = b.add("ReduceProd", [_sizes(b)], keepdims=0)
    b.add("Range", [b.integers(0), sizes, b.integers(1)])


def _nonzero(b: _Builder) -> None:
    b.add("Gather", [b.add("NonZero", [b.value(rank_min=1)]), b.integers(0)])


def _triangle(b: _Builder) -> None:
    b.add("Trilu", [b.value(rank_min=2)], upper=b.number(0, 1))


def _gather_nd(b: _Builder) -> None:
    x = b.value(rank_min=1)
    indices = b.add("Mod", [b.value("i", rank_min=1), b.integers(min(b.shape(x)) or 1)])
    b.add("GatherND", [x, indices], batch_dims=b.number(0, 2))


def _own_rows(b: _Builder) -> None:
    """Add a selection of each row's own elements by row number, or one that is slightly different."""
    x = b.value(rank_min=1)
    rows = b.add("Gather", [b.add("Shape", [x]), b.integers(b.number(0, 1))])
    numbers = b.add("Range", [b.integers(b.one_of([0, 0, 0, 1])), rows, b.integers(1)])
    if b.number(0, 2):
        numbers = b.add("Unsqueeze", [numbers, b.integers([b.one_of([1, 1, 0])])])
    if not b.number(0, 4):
        numbers = b.add("Expand", [numbers, b.integers([1, b.number(1, 2)])])
    if not b.number(0, 4):
        numbers = b.add("Concat", [numbers, numbers], axis=-1)
    elif b.number(0, 1):
        numbers = b.add("Mod", [numbers, b.integers(2)]) if not b.number(0, 4) else numbers
        column = b.add(
            "Mod",
            [
                b.add("Slice", [b.value("i", rank_min=2), b.integers([0]), b.integers([1]), b.integers([1])]),
                b.integers(2),
            ],
        )
        numbers = b.add("Concat", [numbers, column] if b.number(0, 3) else [column, numbers], axis=-1)
    if b.number(0, 2):
        b.add(b.one_of(["GatherND", "GatherND", "Gather"]), [x, numbers])
    else:
        b.add("ScatterND", [x, numbers, b.value()])


def _flat_places(b: _Builder) -> None:
    """Look places up in all rows as one sequence, as TorchScript does, or in a way that is slightly different."""
    x = b.value(rank_min=2)
    shape = b.add("Shape", [x])
    rows, length = (b.add("Gather", [shape, b.integers([at])]) for at in (0, 1))
    flat = b.add("Reshape", [x, b.integers([-1, *b.shape(x)[2:]])])
    zero, one = b.integers(0), b.integers(1)
    count = b.add("Squeeze", [rows, b.integers([0])])
    numbers = b.add("Range", [zero, count, one])
    numbers = b.add("Unsqueeze", [numbers, b.integers([1] if b.number(0, 5) else [0])])
    numbers = b.add("Mul", [numbers, length if b.number(0, 3) else b.integers([b.number(0, 3)])])
    size = b.add("Squeeze", [length, b.integers([0])]) if b.number(0, 1) else b.integers(b.number(1, 4))
    places = b.add("Range", [b.integers(b.one_of([0, 0, 0, 0, 1])), size, one])
    if not b.number(0, 3):
        places = b.one_of([b.integers([b.number(-1, 2)]), b.add("Mod", [b.value("i"), b.integers(2)])])
    if not b.number(0, 5):
        places = b.add("Unsqueeze", [places, b.integers([1])])
    b.add("Gather", [flat, b.add("Add", [numbers, places] if b.number(0, 1) else [places, numbers])])


def _branch(b: _Builder) -> None:
    """Add an If whose condition is a constant, a size or data."""
    x, y = b.value(), b.value()
    kind = b.number(0, 2)
    if kind == 0:
        condition = b.constant(np.array(bool(b.number(0, 1))))
    elif kind == 1:
        condition = b.add("Equal", [b.add("Size", [b.value()]), b.integers(b.number(1, 4))])
    else:
        condition = b.add("Greater", [b.add("ReduceMax", [b.value()], keepdims=0), b.floats([])])
    branches = [
        helper.make_graph(
            [helper.make_node(op, inputs, [f"{op}_result"])],
            op,
            [],
            [helper.make_empty_tensor_value_info(f"{op}_result")],
        )
        for op, inputs in (("Neg", [x]), ("Add", [x, y]))
    ]
    b.add("If", [condition], then_branch=branches[0], else_branch=branches[1], captured=[x, y])


def _loop(b: _Builder) -> None:
    """Add a Loop with a state that has rows, and the stacked outputs of its iterations."""
    x, y = b.value(), b.value()
    count = b.integers(b.number(0, 3)) if b.number(0, 2) else b.add("Size", [b.value()])
    op = b.one_of(["Add", "Mul", "MatMul", "Sub"])
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["going_on"]),
            helper.make_node(op, ["state", y], ["next"]),
            helper.make_node("Identity", ["state"], ["seen"]),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("going_on", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("seen", TensorProto.FLOAT, None),
        ],
    )
    b.add("Loop", [count, "", x], outputs=2, body=body, captured=[y])


STEPS = [
    *(_shuffle, _shuffle, _shuffle, _own_rows, _own_rows, _branch, _loop),
    *(_unary, _binary, _weighted, _matmul, _gemm, _einsum, _transpose, _reshape, _by_shape, _count, _softmax, _norm),
    *(_reduce, _arg, _to_float, _concat, _slice, _gather, _embed, _axes, _flatten, _running, _top, _where, _pad, _conv),
    *(_pool, _split, _scatter, _one_hot, _positions, _nonzero, _triangle, _gather_nd, _flat_places),
    *(_binary, _transpose, _reshape, _reshape, _by_shape, _weighted, _reduce, _axes),
]


@st.composite
def graphs(draw: Draw, steps_max: int = 8, rows: int = ROWS) -> Graph:
    """Draw a graph of up to `steps_max` steps, which runs for `rows` rows; its outputs are some of its values."""
    builder = _Builder(draw)
    for index in range(draw(st.integers(1, 2))):
        tail = tuple(draw(st.lists(st.integers(1, 4), max_size=3)))
        builder.inputs[f"x{index}"] = tail
        builder.values[f"x{index}"] = np.linspace(-2, 2, rows * int(np.prod(tail)), dtype=np.float32).reshape(
            rows, *tail
        )
    builder.inputs["k"] = (2,)
    builder.values["k"] = np.arange(rows * 2, dtype=np.int64).reshape(rows, 2)
    for _ in range(draw(st.integers(1, steps_max))):
        step = draw(st.sampled_from(STEPS))
        try:
            step(builder)
        except Exception:
            continue  # the step does not fit these shapes
    return Graph(_model(builder, draw), dict(builder.inputs))


def _model(builder: _Builder, draw: Draw) -> onnx.ModelProto:
    computed = [name for node in builder.nodes for name in node.output] or list(builder.inputs)
    names = (
        [computed[-1]]
        if len(computed) < 2 or draw(st.booleans())
        else list(dict.fromkeys([computed[-2], computed[-1]]))
    )
    ports = [
        helper.make_tensor_value_info(name, _element_type(builder.values[name]), ["N", *tail])
        for name, tail in builder.inputs.items()
    ]
    outputs = [helper.make_tensor_value_info(name, _element_type(builder.values[name]), None) for name in names]
    graph = helper.make_graph(_needed(builder.nodes, names), "random", ports, outputs, builder.weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)


def _needed(nodes: Sequence[onnx.NodeProto], outputs: Sequence[str]) -> list[onnx.NodeProto]:
    """Return the nodes that the outputs depend on: failures of other nodes do not concern the analysis."""
    wanted, kept = set(outputs), []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            wanted.update(node.input)
            for attribute in node.attribute:
                wanted.update(name for inner in attribute.g.node for name in inner.input)
            kept.append(node)
    return kept[::-1]


def _element_type(array: Array) -> int:
    return int(helper.np_dtype_to_tensor_dtype(array.dtype))
