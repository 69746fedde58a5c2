"""Builds small real ONNX models: each builder writes one file and returns its path.

A model is built once per test session, and later calls only write its bytes. Weights are seeded, so that they are the
same in every session.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from itertools import pairwise
from pathlib import Path
from typing import Concatenate, ParamSpec

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

P = ParamSpec("P")
Dim = int | str

OPSET = 17
IR_VERSION = 8

#: v2 datatype -> ONNX element type
ELEMENT_TYPE: dict[str, int] = {
    "BOOL": TensorProto.BOOL,
    "UINT8": TensorProto.UINT8,
    "UINT16": TensorProto.UINT16,
    "UINT32": TensorProto.UINT32,
    "UINT64": TensorProto.UINT64,
    "INT8": TensorProto.INT8,
    "INT16": TensorProto.INT16,
    "INT32": TensorProto.INT32,
    "INT64": TensorProto.INT64,
    "FP16": TensorProto.FLOAT16,
    "BF16": TensorProto.BFLOAT16,
    "FP32": TensorProto.FLOAT,
    "FP64": TensorProto.DOUBLE,
    "BYTES": TensorProto.STRING,
}


def _builder(build: Callable[P, onnx.ModelProto]) -> Callable[Concatenate[Path, P], Path]:
    """Turn a function that builds a model into one that writes it to a path; each set of arguments is built once."""

    made: dict[object, bytes] = {}

    def write(path: Path, /, *args: P.args, **kwargs: P.kwargs) -> Path:
        key = (args, tuple(sorted(kwargs.items())))
        if key not in made:
            model = build(*args, **kwargs)
            onnx.checker.check_model(model)
            made[key] = bytes(model.SerializeToString())
        path.write_bytes(made[key])
        return path

    update_wrapper(write, build)
    return write


def _value(name: str, datatype: str, shape: Sequence[Dim]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ELEMENT_TYPE[datatype], list(shape))


def _model(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto] = (),
    opset: int = OPSET,
) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "graph", list(inputs), list(outputs), list(weights))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=IR_VERSION)


def _float(name: str, array: np.ndarray) -> onnx.TensorProto:
    return numpy_helper.from_array(array.astype(np.float32), name)


def _integer(name: str, values: Sequence[int] | int) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(values, np.int64), name)


@_builder
def mlp(rows: Dim = "N") -> onnx.ModelProto:
    """64-256-256-10 with ReLU: "input" FP32 [rows, 64] -> "output" FP32 [rows, 10]. The benchmarks serve it."""
    rng = np.random.default_rng(1)
    sizes = [64, 256, 256, 10]
    nodes, weights, value = [], [], "input"
    for layer, (fan_in, fan_out) in enumerate(pairwise(sizes)):
        weights += [
            _float(f"w{layer}", rng.standard_normal((fan_in, fan_out)) * (2 / fan_in) ** 0.5),
            _float(f"b{layer}", rng.standard_normal(fan_out) * 0.1),
        ]
        last = layer == len(sizes) - 2
        sums = "output" if last else f"sums{layer}"
        nodes.append(helper.make_node("Gemm", [value, f"w{layer}", f"b{layer}"], [sums]))
        if not last:
            nodes.append(helper.make_node("Relu", [sums], [f"hidden{layer}"]))
            value = f"hidden{layer}"
    return _model(nodes, [_value("input", "FP32", [rows, 64])], [_value("output", "FP32", [rows, 10])], weights)


@_builder
def identity(datatype: str = "FP32", shape: tuple[Dim, ...] = ("N", 2)) -> onnx.ModelProto:
    """ "x" -> "y", the same tensor, of any v2 datatype and shape."""
    node = helper.make_node("Identity", ["x"], ["y"])
    return _model([node], [_value("x", datatype, shape)], [_value("y", datatype, shape)])


@_builder
def identities(datatypes: tuple[str, ...], columns: int = 3) -> onnx.ModelProto:
    """One input and one output for each datatype: "x0" -> "y0", "x1" -> "y1", … each [N, columns]."""
    shape: list[Dim] = ["N", columns]
    nodes = [helper.make_node("Identity", [f"x{i}"], [f"y{i}"]) for i in range(len(datatypes))]
    inputs = [_value(f"x{i}", datatype, shape) for i, datatype in enumerate(datatypes)]
    outputs = [_value(f"y{i}", datatype, shape) for i, datatype in enumerate(datatypes)]
    return _model(nodes, inputs, outputs)


@_builder
def scale(factor: float = 2.0, columns: int = 2) -> onnx.ModelProto:
    """ "x" FP32 [N, columns] -> "y", the same shape, = factor x: versions with one signature and different answers."""
    node = helper.make_node("Mul", ["x", "factor"], ["y"])
    weights = [_float("factor", np.array(factor))]
    return _model([node], [_value("x", "FP32", ["N", columns])], [_value("y", "FP32", ["N", columns])], weights)


@_builder
def wide(columns: int = 1 << 21) -> onnx.ModelProto:
    """ "x" FP32 [N, 1] -> "y" FP32 [N, 1] = x * columns, computed with a tensor of 4 * columns bytes per row."""
    nodes = [helper.make_node("Mul", ["x", "ones"], ["wide"]), helper.make_node("ReduceSum", ["wide", "axes"], ["y"])]
    weights = [_float("ones", np.ones((1, columns))), _integer("axes", [1])]
    return _model(nodes, [_value("x", "FP32", ["N", 1])], [_value("y", "FP32", ["N", 1])], weights)


@_builder
def spread(columns: int = 1 << 16) -> onnx.ModelProto:
    """ "x" FP32 [N, 1] -> "y" FP32 [N, M] = x in each of `columns` columns: an output whose size is not declared."""
    node = helper.make_node("Mul", ["x", "ones"], ["y"])
    weights = [_float("ones", np.ones((1, columns)))]
    return _model([node], [_value("x", "FP32", ["N", 1])], [_value("y", "FP32", ["N", "M"])], weights)


@_builder
def blank() -> onnx.ModelProto:
    """ "count" INT64 [1] -> "y" FP32 [M], `count` zeros: outputs as large as the caller requests."""
    node = helper.make_node("ConstantOfShape", ["count"], ["y"])
    return _model([node], [_value("count", "INT64", [1])], [_value("y", "FP32", ["M"])])


@_builder
def weighty(size_bytes: int) -> onnx.ModelProto:
    """ "x" FP32 [N, 1] -> "y" FP32 [N, 1] = x, with weights of `size_bytes` that are not all equal."""
    weights = np.zeros((size_bytes // 4 // 1024, 1024))
    weights[0, 0] = 1
    nodes = [
        helper.make_node("Mul", ["x", "one"], ["scaled"]),
        helper.make_node("ReduceSum", ["weights", "axes"], ["one"], keepdims=1),
    ]
    nodes.reverse()
    initializers = [_float("weights", weights), _integer("axes", [0, 1])]
    nodes.append(helper.make_node("Identity", ["scaled"], ["y"]))
    return _model(nodes, [_value("x", "FP32", ["N", 1])], [_value("y", "FP32", ["N", 1])], initializers)


@_builder
def heavy(size_bytes: int) -> onnx.ModelProto:
    """ "x" FP32 [N, 1024] -> "y" FP32 [N, 1], with a matrix of `size_bytes` that an instance keeps."""
    weights = np.full((1024, size_bytes // 4 // 1024), 0.5)
    nodes = [
        helper.make_node("MatMul", ["x", "weights"], ["products"]),
        helper.make_node("ReduceSum", ["products", "axes"], ["y"], keepdims=1),
    ]
    initializers = [_float("weights", weights), _integer("axes", [1])]
    return _model(nodes, [_value("x", "FP32", ["N", 1024])], [_value("y", "FP32", ["N", 1])], initializers)


@_builder
def fragile() -> onnx.ModelProto:
    """ "x" INT64 [N, 1] -> "y" INT64 [N, 1] = -2^63 / x: ONNX Runtime checks for 0, and -1 ends the
    process (SIGFPE).
    """
    node = helper.make_node("Div", ["least", "x"], ["y"])
    weights = [_integer("least", -(2**63))]
    return _model([node], [_value("x", "INT64", ["N", 1])], [_value("y", "INT64", ["N", 1])], weights)


@_builder
def crashes_on_zeros() -> onnx.ModelProto:
    """ "x" FP32 [N, 1] -> "y" INT64 [N, 1] = -2^63 / (x == 0 ? -1 : 1): zeros end the process."""
    nodes = [
        helper.make_node("Cast", ["x"], ["b"], to=TensorProto.BOOL),
        helper.make_node("Where", ["b", "one", "minus"], ["d"]),
        helper.make_node("Div", ["least", "d"], ["y"]),
    ]
    weights = [_integer("least", -(2**63)), _integer("one", 1), _integer("minus", -1)]
    return _model(nodes, [_value("x", "FP32", ["N", 1])], [_value("y", "INT64", ["N", 1])], weights)


@_builder
def crashing(on: int = 0) -> onnx.ModelProto:
    """ "x" INT64 [N, 1] -> "y" INT64 [N, 1]; an element equal to `on` ends the process (SIGFPE), as in `fragile`."""
    nodes = [
        helper.make_node("Equal", ["x", "on"], ["is"]),
        helper.make_node("Where", ["is", "minus", "two"], ["by"]),
        helper.make_node("Div", ["least", "by"], ["y"]),
    ]
    weights = [_integer("on", on), _integer("minus", -1), _integer("two", 2), _integer("least", -(2**63))]
    return _model(nodes, [_value("x", "INT64", ["N", 1])], [_value("y", "INT64", ["N", 1])], weights)


@_builder
def endless(on: int = 0) -> onnx.ModelProto:
    """ "x" INT64 [N, 1] -> "y" INT64 [N, 1] = x; an element equal to `on` lets a Loop run for years, others run
    once.
    """
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["go_on"]), helper.make_node("Add", ["sum", "one"], ["sum_out"])],
        "body",
        [_value("i", "INT64", []), _value("go", "BOOL", []), _value("sum", "INT64", [])],
        [_value("go_on", "BOOL", []), _value("sum_out", "INT64", [])],
        [_integer("one", 1)],
    )
    nodes = [
        helper.make_node("Equal", ["x", "on"], ["is"]),
        helper.make_node("Where", ["is", "ever", "once"], ["each"]),
        helper.make_node("ReduceMax", ["each"], ["times"], keepdims=0),
        helper.make_node("Loop", ["times", "true", "zero"], ["ran"], body=body),
        helper.make_node("Mul", ["ran", "zero"], ["nothing"]),
        helper.make_node("Add", ["x", "nothing"], ["y"]),
    ]
    weights = [
        _integer("on", on),
        _integer("ever", 1 << 60),
        _integer("once", 1),
        _integer("zero", 0),
        numpy_helper.from_array(np.array(True), "true"),
    ]
    return _model(nodes, [_value("x", "INT64", ["N", 1])], [_value("y", "INT64", ["N", 1])], weights)


@_builder
def laborious(on: int = 0, side: int = 2048, products: int = 400) -> onnx.ModelProto:
    """ "x" INT64 [N, 1] -> "y" INT64 [N, 1] = x; an element equal to `on` causes matrix products that take minutes.

    Each product is an operator of its own, since OpenVINO does not end a Loop.
    """
    nodes = [
        helper.make_node("Equal", ["x", "on"], ["is"]),
        helper.make_node("Where", ["is", "side", "one"], ["each"]),
        helper.make_node("ReduceMax", ["each"], ["most"], keepdims=0),
        helper.make_node("Reshape", ["most", "single"], ["most1"]),
        helper.make_node("Concat", ["most1", "most1"], ["shape"], axis=0),
        helper.make_node("ConstantOfShape", ["shape"], ["m0"], value=_float("value", np.array([0.0]))),
        *(helper.make_node("MatMul", [f"m{i}", "m0"], [f"m{i + 1}"]) for i in range(products)),
        helper.make_node("ReduceMax", [f"m{products}"], ["zero"], keepdims=0),
        helper.make_node("Cast", ["zero"], ["nothing"], to=TensorProto.INT64),
        helper.make_node("Add", ["x", "nothing"], ["y"]),
    ]
    weights = [_integer("on", on), _integer("side", side), _integer("one", 1), _integer("single", [1])]
    return _model(nodes, [_value("x", "INT64", ["N", 1])], [_value("y", "INT64", ["N", 1])], weights)


@_builder
def unstoppable(on: int = 0, boxes: int = 3_000_000) -> onnx.ModelProto:
    """ "x" INT64 [N, 1] -> "y" INT64 [N, 1] = x; an element equal to `on` makes one operator run for hours.

    ONNX Runtime checks only between operators whether to end a run. Here non-maximum suppression compares each pair of
    `boxes` boxes, none of which overlap.
    """
    nodes = [
        helper.make_node("Equal", ["x", "on"], ["is"]),
        helper.make_node("Where", ["is", "many", "one"], ["each"]),
        helper.make_node("ReduceMax", ["each"], ["count"], keepdims=0),
        helper.make_node("Range", ["zero", "count", "one0"], ["numbers"]),
        helper.make_node("Cast", ["numbers"], ["at"], to=TensorProto.FLOAT),
        helper.make_node("Reshape", ["at", "column"], ["left"]),
        helper.make_node("Add", ["left", "half"], ["right"]),
        helper.make_node("Mul", ["left", "none"], ["top"]),
        helper.make_node("Add", ["top", "half"], ["bottom"]),
        helper.make_node("Concat", ["top", "left", "bottom", "right"], ["boxes2"], axis=1),
        helper.make_node("Reshape", ["boxes2", "boxes_shape"], ["boxes"]),
        helper.make_node("Reshape", ["right", "scores_shape"], ["scores"]),
        helper.make_node("NonMaxSuppression", ["boxes", "scores", "all", "overlap"], ["kept"]),
        helper.make_node("ReduceMin", ["kept"], ["least"], keepdims=0),
        helper.make_node("Mul", ["least", "zero"], ["nothing"]),
        helper.make_node("Add", ["x", "nothing"], ["y"]),
    ]
    weights = [
        _integer("on", on),
        _integer("many", boxes),
        _integer("one", 1),
        _integer("one0", 1),
        _integer("zero", 0),
        _float("half", np.array(0.5)),
        _float("none", np.array(0.0)),
        _integer("column", [-1, 1]),
        _integer("boxes_shape", [1, -1, 4]),
        _integer("scores_shape", [1, 1, -1]),
        _integer("all", [boxes]),
        _float("overlap", np.array([0.5])),
    ]
    return _model(nodes, [_value("x", "INT64", ["N", 1])], [_value("y", "INT64", ["N", 1])], weights)


@_builder
def add_sub() -> onnx.ModelProto:
    """Two inputs, two outputs: "a", "b" FP32 [N, 4] -> "sum", "difference" FP32 [N, 4]."""
    nodes = [helper.make_node("Add", ["a", "b"], ["sum"]), helper.make_node("Sub", ["a", "b"], ["difference"])]
    shape: list[Dim] = ["N", 4]
    return _model(
        nodes,
        [_value("a", "FP32", shape), _value("b", "FP32", shape)],
        [_value("sum", "FP32", shape), _value("difference", "FP32", shape)],
    )


@_builder
def largest() -> onnx.ModelProto:
    """ "x" FP32 [M] -> "y" INT64 []: the position of the largest number; an empty tensor has none."""
    node = helper.make_node("ArgMax", ["x"], ["y"], axis=0, keepdims=0)
    return _model([node], [_value("x", "FP32", ["M"])], [_value("y", "INT64", [])])


@_builder
def scaled() -> onnx.ModelProto:
    """An optional input: "x" FP32 [N, 4], "scale" FP32 [M, 1], 2 by default -> "y" = scale * x."""
    node = helper.make_node("Mul", ["x", "scale"], ["y"])
    inputs = [_value("scale", "FP32", ["M", 1]), _value("x", "FP32", ["N", 4])]
    return _model([node], inputs, [_value("y", "FP32", ["N", 4])], [_float("scale", np.full((1, 1), 2.0))])


@_builder
def convolution(rows: Dim = 1) -> onnx.ModelProto:
    """A small CNN whose rows are independent: "image" FP32 [rows, 3, 8, 8] -> "scores" FP32 [rows, 5].

    With `rows` 1 it is like the output of many exporters: a batch fixed at 1 that can be made symbolic.
    """
    rng = np.random.default_rng(2)
    weights = [
        _float("kernel", rng.standard_normal((4, 3, 3, 3)) * 0.3),
        _float("matrix", rng.standard_normal((4 * 6 * 6, 5)) * 0.1),
    ]
    nodes = [
        helper.make_node("Conv", ["image", "kernel"], ["features"]),
        helper.make_node("Relu", ["features"], ["active"]),
        helper.make_node("Flatten", ["active"], ["flat"], axis=1),
        helper.make_node("MatMul", ["flat", "matrix"], ["scores"]),
    ]
    return _model(nodes, [_value("image", "FP32", [rows, 3, 8, 8])], [_value("scores", "FP32", [rows, 5])], weights)


@_builder
def row_mixing(rows: Dim = 1) -> onnx.ModelProto:
    """Requests must share no run: "x" FP32 [rows, 4] is divided by the sum over *all* rows -> "y" of that shape."""
    nodes = [
        helper.make_node("ReduceSum", ["x"], ["total"], keepdims=1),
        helper.make_node("Div", ["x", "total"], ["y"]),
    ]
    return _model(nodes, [_value("x", "FP32", [rows, 4])], [_value("y", "FP32", [rows, 4])])


@_builder
def coupled(above: float = 1000.0) -> onnx.ModelProto:
    """ "x" FP32 [N, 2] -> "y" FP32 [N, 2] = x, minus the mean of all rows if any element is above `above`."""
    nodes = [
        helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0),
        helper.make_node("Greater", ["most", "above"], ["is"]),
        helper.make_node("Cast", ["is"], ["share"], to=TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["x"], ["mean"], axes=[0], keepdims=1),
        helper.make_node("Mul", ["mean", "share"], ["less"]),
        helper.make_node("Sub", ["x", "less"], ["y"]),
    ]
    return _model(
        nodes, [_value("x", "FP32", ["N", 2])], [_value("y", "FP32", ["N", 2])], [_float("above", np.array(above))]
    )


@_builder
def widening(on: float = 777.0) -> onnx.ModelProto:
    """ "x" FP32 [N, 1] -> "y" FP32 [N, M] = x, twice in each row if an element of the batch is `on`."""
    nodes = [
        helper.make_node("Sub", ["x", "on"], ["off"]),
        helper.make_node("Abs", ["off"], ["away"]),
        helper.make_node("ReduceMin", ["away"], ["least"], axes=[0], keepdims=0),
        helper.make_node("Equal", ["least", "zero"], ["is"]),
        helper.make_node("Cast", ["is"], ["more"], to=TensorProto.INT64),
        helper.make_node("Add", ["more", "one"], ["times"]),
        helper.make_node("Concat", ["one", "times"], ["repeats"], axis=0),
        helper.make_node("Tile", ["x", "repeats"], ["y"]),
    ]
    weights = [_float("on", np.array([on])), _float("zero", np.array([0.0])), _integer("one", [1])]
    return _model(nodes, [_value("x", "FP32", ["N", 1])], [_value("y", "FP32", ["N", "M"])], weights)


@_builder
def lookup() -> onnx.ModelProto:
    """Fails at run time on some values.

    "index" INT64 [N, 1] -> "y" FP32 [N, 1] = 10 x; an index outside -8 … 7 is an error.
    """
    table = _float("table", np.arange(8) * 10.0)
    node = helper.make_node("Gather", ["table", "index"], ["y"], axis=0)
    return _model([node], [_value("index", "INT64", ["N", 1])], [_value("y", "FP32", ["N", 1])], [table])


@_builder
def failing() -> onnx.ModelProto:
    """As `lookup`, but an index outside of the table ends the run with an error that only the model knows of."""
    nodes = [
        helper.make_node("Clip", ["index", "low", "high"], ["clipped"]),
        helper.make_node("Equal", ["index", "clipped"], ["inside"]),
        helper.make_node("Cast", ["inside"], ["one"], to=onnx.TensorProto.INT64),
        helper.make_node("Div", ["index", "one"], ["checked"]),
        helper.make_node("Gather", ["table", "checked"], ["y"], axis=0),
    ]
    weights = [_float("table", np.arange(8) * 10.0), _integer("low", -8), _integer("high", 7)]
    return _model(nodes, [_value("index", "INT64", ["N", 1])], [_value("y", "FP32", ["N", 1])], weights)


@_builder
def slow(rounds: int = 2000) -> onnx.ModelProto:
    """A loop of `rounds` 128 x 128 matrix products (about 5 us each): "x" FP32 [N, 128] -> "y" FP32 [N, 128]."""
    rotation, _ = np.linalg.qr(np.random.default_rng(3).standard_normal((128, 128)))
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going"], ["going_on"]),
            helper.make_node("MatMul", ["state", "rotation"], ["state_next"]),
        ],
        "body",
        [_value("round", "INT64", []), _value("going", "BOOL", []), _value("state", "FP32", ["N", 128])],
        [_value("going_on", "BOOL", []), _value("state_next", "FP32", ["N", 128])],
    )
    node = helper.make_node("Loop", ["rounds", "", "x"], ["y"], body=body)
    weights = [_integer("rounds", rounds), _float("rotation", rotation)]
    return _model([node], [_value("x", "FP32", ["N", 128])], [_value("y", "FP32", ["N", 128])], weights)


@_builder
def variable_length() -> onnx.ModelProto:
    """Rows of any length: "x" FP32 [N, L] -> "doubled" FP32 [N, L], "total" FP32 [N, 1]."""
    nodes = [
        helper.make_node("Add", ["x", "x"], ["doubled"]),
        helper.make_node("ReduceSum", ["x", "axes"], ["total"], keepdims=1),
    ]
    outputs = [_value("doubled", "FP32", ["N", "L"]), _value("total", "FP32", ["N", 1])]
    return _model(nodes, [_value("x", "FP32", ["N", "L"])], outputs, [_integer("axes", [1])])


@_builder
def windowed(window: int = 16) -> onnx.ModelProto:
    """Rows whose length must be a multiple of `window`: "x" FP32 [N, L] -> "means" FP32 [N, M]."""
    nodes = [
        helper.make_node("Reshape", ["x", "windows"], ["parts"]),
        helper.make_node("ReduceMean", ["parts"], ["means"], axes=[2], keepdims=0),
    ]
    inputs, outputs = [_value("x", "FP32", ["N", "L"])], [_value("means", "FP32", ["N", "M"])]
    return _model(nodes, inputs, outputs, [_integer("windows", [0, -1, window])])


@_builder
def image_means(name: str = "image") -> onnx.ModelProto:
    """A run that is nearly free for 602 KB of input: `name` FP32 [N, 3, 224, 224] -> "means" FP32 [N, 3]."""
    node = helper.make_node("ReduceMean", [name], ["means"], axes=[2, 3], keepdims=0)
    return _model([node], [_value(name, "FP32", ["N", 3, 224, 224])], [_value("means", "FP32", ["N", 3])])


@_builder
def loudness() -> onnx.ModelProto:
    """Mean squares of recordings: "input_values" FP32 [N, L] -> "power" FP32 [N, 1]."""
    nodes = [
        helper.make_node("Mul", ["input_values", "input_values"], ["squares"]),
        helper.make_node("ReduceMean", ["squares"], ["power"], axes=[1], keepdims=1),
    ]
    return _model(nodes, [_value("input_values", "FP32", ["N", "L"])], [_value("power", "FP32", ["N", 1])])


@_builder
def transpose() -> onnx.ModelProto:
    """Does not batch: "x" FP32 [3, 4] -> "y" FP32 [4, 3]."""
    node = helper.make_node("Transpose", ["x"], ["y"], perm=[1, 0])
    return _model([node], [_value("x", "FP32", [3, 4])], [_value("y", "FP32", [4, 3])])


@_builder
def embeddings(pooled: bool = False, types: bool = False) -> onnx.ModelProto:
    """An embedding of 32 tokens.

    "input_ids", "attention_mask" (, "token_type_ids") INT64 [N, L] -> "last_hidden_state" FP32 [N, L, 8].
    With `pooled` the output is "embedding" FP32 [N, 8], the sum over the unmasked tokens. Type 0 adds nothing.
    """
    rng = np.random.default_rng(6)
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["vectors"], axis=0),
        helper.make_node("Cast", ["attention_mask"], ["there"], to=TensorProto.FLOAT),
        helper.make_node("Unsqueeze", ["there", "last"], ["weights"]),
        helper.make_node("Mul", ["vectors", "weights"], ["masked"]),
    ]
    hidden, names = "masked", ["input_ids", "attention_mask"]
    if types:
        names.append("token_type_ids")
        nodes.append(helper.make_node("Gather", ["kinds", "token_type_ids"], ["added"], axis=0))
        nodes.append(helper.make_node("Add", ["masked", "added"], ["typed"]))
        hidden = "typed"
    if pooled:
        nodes.append(helper.make_node("ReduceSum", [hidden, "tokens"], ["embedding"], keepdims=0))
        output = _value("embedding", "FP32", ["N", 8])
    else:
        nodes.append(helper.make_node("Identity", [hidden], ["last_hidden_state"]))
        output = _value("last_hidden_state", "FP32", ["N", "L", 8])
    kinds = np.stack([np.zeros(8), rng.standard_normal(8)])
    weights = [_float("table", rng.standard_normal((32, 8))), _integer("last", [2])]
    weights += [_float("kinds", kinds)] * types + [_integer("tokens", [1])] * pooled
    return _model(nodes, [_value(name, "INT64", ["N", "L"]) for name in names], [output], weights)


@_builder
def cross_encoder() -> onnx.ModelProto:
    """A number for a pair of texts.

    "input_ids", "attention_mask", "token_type_ids" INT64 [N, L] -> "logits" FP32 [N, 1]: the sum over the unmasked
    tokens of a number of each token, which is negated where the type is 1.
    """
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["values"], axis=0),
        helper.make_node("Gather", ["signs", "token_type_ids"], ["signed"], axis=0),
        helper.make_node("Cast", ["attention_mask"], ["there"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["values", "signed"], ["both"]),
        helper.make_node("Mul", ["both", "there"], ["masked"]),
        helper.make_node("ReduceSum", ["masked", "tokens"], ["logits"], keepdims=1),
    ]
    weights = [_float("table", np.arange(32) / 4), _float("signs", np.array([1, -1])), _integer("tokens", [1])]
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = [_value(name, "INT64", ["N", "L"]) for name in names]
    return _model(nodes, inputs, [_value("logits", "FP32", ["N", 1])], weights)


@_builder
def labelled(classes: int = 1) -> onnx.ModelProto:
    """Labels and scores of texts: "input_ids" INT64 [N, L] -> "label" BYTES, "score" FP32, both [N] or [N, classes].

    Of token 0 to 6 that is the largest in the text: "word-<token>" and token / 10; class k: "word-<token>-<k>".
    """
    nodes = [helper.make_node("ReduceMax", ["input_ids"], ["token"], axes=[1], keepdims=int(classes > 1))]
    weights = [_float("scores", np.arange(7) / 10)]
    for k in range(classes):  # ONNX Runtime gathers only the first string of a row
        words = [f"word-{at}" + f"-{k}" * (classes > 1) for at in range(7)]
        weights.append(numpy_helper.from_array(np.array(words, object), f"words-{k}"))
        for name, table in ((f"label-{k}", f"words-{k}"), (f"score-{k}", "scores")):
            nodes.append(helper.make_node("Gather", [table, "token"], [name], axis=0))
    for name in ("label", "score"):
        each = [f"{name}-{k}" for k in range(classes)]
        joined = helper.make_node("Concat", each, [name], axis=1)
        nodes.append(joined if classes > 1 else helper.make_node("Identity", each, [name]))
    shape: list[Dim] = ["N", classes] if classes > 1 else ["N"]
    outputs = [_value("label", "BYTES", shape), _value("score", "FP32", shape)]
    return _model(nodes, [_value("input_ids", "INT64", ["N", "L"])], outputs, weights)


@_builder
def squeezenet(rows: Dim = "N", seed: int = 4) -> onnx.ModelProto:
    """SqueezeNet 1.0 with He-normal weights (5 MB): "data_0" FP32 [rows, 3, 224, 224] -> "scores" [rows, 1000].

    The architecture is the onnx package's light model, whose constant weights make every output the same.
    """
    light = onnx.load(str(Path(onnx.__file__).parent / "backend/test/data/light/light_squeezenet.onnx"))
    rng = np.random.default_rng(seed)
    kept = {tensor.name: tensor for tensor in light.graph.initializer}
    shapes = {name: numpy_helper.to_array(tensor) for name, tensor in kept.items() if name.endswith("__SHAPE")}
    weights, nodes = [], []
    for node in light.graph.node:
        if node.op_type == "ConstantOfShape":
            shape = tuple(int(size) for size in shapes[node.input[0]])
            fan_in = int(np.prod(shape[1:])) or 1
            weights.append(_float(node.output[0], rng.standard_normal(shape) * (2 / fan_in) ** 0.5))
        else:
            nodes.append(node)
    weights += [tensor for name, tensor in kept.items() if name not in shapes]
    softmax = nodes[-1]
    flatten = helper.make_node("Flatten", [softmax.input[0]], ["flat"], axis=1)
    nodes[-1:] = [flatten, helper.make_node("Softmax", ["flat"], ["scores"], axis=1)]
    inputs, outputs = [_value("data_0", "FP32", [rows, 3, 224, 224])], [_value("scores", "FP32", [rows, 1000])]
    return _model(nodes, inputs, outputs, weights, opset=9)
