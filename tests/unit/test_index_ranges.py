"""Which inputs of a graph are indices of a table, and how large that is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from millstream.services.ingest.model_io import index_ranges
from millstream.services.model.signature import TensorSpec

ROWS = numpy_helper.from_array(np.zeros((9, 4), np.float32), "rows")
LINE = numpy_helper.from_array(np.zeros(5, np.float32), "line")
SMALL = numpy_helper.from_array(np.zeros((3, 4), np.float32), "small")
BYTES = numpy_helper.from_array(np.zeros((7, 4), np.int8), "bytes")
SCALE = numpy_helper.from_array(np.ones(1, np.float32), "scale")
SHAPE = numpy_helper.from_array(np.array([-1]), "shape")
EMBEDDED = ["ids", "types", "rows", "small", "small"]


def node(kind: str, *inputs: str, to: str, domain: str = "", **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, list(inputs), [to], domain=domain, **attributes)


def gather(table: str, indices: str, to: str = "y", **attributes: Any) -> onnx.NodeProto:
    return node("Gather", table, indices, to=to, **attributes)


def model(nodes: Sequence[onnx.NodeProto]) -> onnx.ModelProto:
    graph = helper.make_graph(nodes, "g", [], [], [ROWS, LINE, SMALL, BYTES, SCALE, SHAPE])
    return helper.make_model(graph)


CASES: dict[str, tuple[list[onnx.NodeProto], dict[str, tuple[int, int]]]] = {
    "an embedding": ([gather("rows", "ids")], {"ids": (0, 8)}),
    "a table of numbers, from whose end ONNX counts": ([gather("line", "ids")], {"ids": (-5, 4)}),
    "another axis": ([gather("rows", "ids", axis=-1)], {"ids": (0, 3)}),
    "an axis that is none": ([gather("rows", "ids", axis=7)], {}),
    "two tables": ([gather("rows", "ids"), gather("small", "ids", "z")], {"ids": (0, 2)}),
    "two inputs": ([gather("rows", "ids"), gather("small", "types", "z")], {"ids": (0, 8), "types": (0, 2)}),
    "other uses beside it": ([gather("rows", "ids"), node("Equal", "ids", "shape", to="e")], {"ids": (0, 8)}),
    "a changed shape": (
        [node("Cast", "ids", to="a", to_=7), node("Reshape", "a", "shape", to="b"), gather("rows", "b")],
        {"ids": (0, 8)},
    ),
    "a type that wraps": ([node("Cast", "ids", to="a", to_=TensorProto.UINT8), gather("rows", "a")], {}),
    "arithmetic": ([node("Mod", "ids", "shape", to="a"), gather("rows", "a")], {}),
    "a part": ([node("Slice", "ids", "shape", "shape", to="a"), gather("rows", "a")], {}),
    "floats": ([gather("rows", "x")], {}),
    "a table that a request gives": ([gather("x", "ids")], {}),
    "a quantised table": ([node("DequantizeLinear", "bytes", "scale", to="t"), gather("t", "ids")], {"ids": (0, 6)}),
    "a constant": ([node("Constant", to="t", value=ROWS), gather("t", "ids")], {"ids": (0, 8)}),
    "an operator of embeddings": (
        [node("EmbedLayerNormalization", *EMBEDDED, to="y", domain="com.microsoft")],
        {"ids": (0, 8), "types": (0, 2)},
    ),
    "an operator of embeddings without types": (
        [node("EmbedLayerNormalization", "ids", "", "rows", "small", to="y", domain="com.microsoft")],
        {"ids": (0, 8)},
    ),
    "an operator of another domain": ([node("Gather", "rows", "ids", to="y", domain="mine")], {}),
    "a node without operands": ([node("Gather", to="y")], {}),
}


@pytest.mark.parametrize(("nodes", "expected"), CASES.values(), ids=list(CASES))
def test_index_ranges(nodes: list[onnx.NodeProto], expected: dict[str, tuple[int, int]]) -> None:
    for one in nodes:
        for attribute in one.attribute:
            attribute.name = attribute.name.rstrip("_")
    inputs = [
        TensorSpec(name="ids", datatype="INT64", shape=(-1, -1)),
        TensorSpec(name="types", datatype="INT32", shape=(-1, -1)),
        TensorSpec(name="x", datatype="FP32", shape=(-1, -1)),
    ]
    assert index_ranges(model(nodes), inputs) == expected


def test_a_table_that_a_request_may_replace_bounds_nothing() -> None:
    inputs = [TensorSpec(name=name, datatype="INT64", shape=(-1,), optional=name == "line") for name in ("ids", "line")]
    assert index_ranges(model([gather("line", "ids")]), inputs) == {}
