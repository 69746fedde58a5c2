"""The proof that rows are independent: graphs that it accepts, and the operator that ends it for others.

Graphs are written in ONNX's text form. Inputs whose names begin with "x" have rows, unless the test says otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from millstream.plugins.proof import analysis
from millstream.plugins.proof.analysis import prove
from millstream.plugins.proof.batch_rewrite import with_variable_rows
from millstream.services.ingest.proof import Proof
from tests.kit import models

HEAD = '<ir_version: 8, opset_import: ["": {opset}, "ai.onnx.ml": 3, "com.microsoft": 1]>'


def parsed(text: str, opset: int = 17) -> onnx.ModelProto:
    return onnx.parser.parse_model(HEAD.replace("{opset}", str(opset)) + text)


def proof(text: str, opset: int = 17, rows: Collection[str] | None = None) -> Proof:
    model = parsed(text, opset)
    return prove(model, rows or [value.name for value in model.graph.input if value.name.startswith("x")])


def ends_with(operator: str, text: str, opset: int = 17, rows: Collection[str] | None = None) -> None:
    found = proof(text, opset, rows)
    assert not found.proven
    assert found.culprit.startswith(operator), found
    assert found.reason


PROVEN = {
    "elementwise": "g (float[N, 4] x) => (float[N, 4] y) { a = Relu(x)  y = Add(a, x) }",
    "a weight for each column": "g (float[N, 4] x) => (float[N, 4] y) <float[4] w = {1, 2, 3, 4}> { y = Mul(x, w) }",
    "a count of columns": "g (float[N, L] x) => (float[N, L] y) { s = Shape<start = 1>(x)  f = Cast<to = 1>(s)  y = Div(x, f) }",
    "a reshape by the shape": """g (float[N, L, 12] x) => (float[N, L, 3, 4] y) {
        s = Shape(x)  zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()
        n = Gather(s, zero)  l = Gather(s, one)  axes = Constant<value_ints = [0]>()
        n1 = Unsqueeze(n, axes)  l1 = Unsqueeze(l, axes)  rest = Constant<value_ints = [3, 4]>()
        target = Concat<axis = 0>(n1, l1, rest)  y = Reshape(x, target) }""",
    "folded into the batch and back": """g (float[N, L, 8] x, float[8, 8] w) => (float[N, L, 8] y) {
        flat = Constant<value_ints = [-1, 8]>()  s = Shape(x)
        a = Reshape(x, flat)  b = MatMul(a, w)  y = Reshape(b, s) }""",
    "time first and back": """g (float[N, L, 8] x) => (float[N, L, 8] y) {
        t = Transpose<perm = [1, 0, 2]>(x)  u = Softmax<axis = 0>(t)  y = Transpose<perm = [1, 0, 2]>(u) }""",
    "a constant repeated for each row": """g (float[N, 4] x) => (float[N, 6] y) <float[1, 2] token = {1, 2}> {
        n = Shape<end = 1>(x)  two = Constant<value_ints = [2]>()  s = Concat<axis = 0>(n, two)
        e = Expand(token, s)  y = Concat<axis = 1>(x, e) }""",
    "zeros for each row": """g (float[N, 4] x) => (float[N, 6] y) {
        n = Shape<end = 1>(x)  two = Constant<value_ints = [2]>()  s = Concat<axis = 0>(n, two)
        z = ConstantOfShape(s)  y = Concat<axis = 1>(x, z) }""",
    "attention of a row to itself": """g (float[N, L, 8] x) => (float[N, L, 8] y) {
        k = Transpose<perm = [0, 2, 1]>(x)  s = MatMul(x, k)  p = Softmax(s)  y = MatMul(p, x) }""",
    "twice the batch": """g (float[N, 4] x) => (float[N, 4] y) <int64[2] shape = {2, -1}, int64[1] axes = {0}> {
        both = Concat<axis = 0>(x, x)  s = Shape(x)  two = Constant<value_ints = [2]>()  t = Concat<axis = 0>(two, s)
        split = Reshape(both, t)  y = ReduceSum<keepdims = 0>(split, axes) }""",
    "an embedding": "g (int64[N, L] x, float[5, 3] table) => (float[N, L, 3] y) { y = Gather(table, x) }",
    "each row's own token": """g (float[N, L, 4] x, int64[N] x_place) => (float[N, 4] y) {
        zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()  s = Shape(x)  n = Gather(s, zero)
        rows = Range(zero, n, one)  last = Constant<value_ints = [-1]>()  a = Unsqueeze(rows, last)
        b = Unsqueeze(x_place, last)  i = Concat<axis = 1>(a, b)  y = GatherND(x, i) }""",
    "each row's own token written": """g (float[N, L, 4] x, int64[N] x_place, float[N, 4] x_new) => (float[N, L, 4] y) {
        zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()  s = Shape(x)  n = Gather(s, zero)
        rows = Range(zero, n, one)  last = Constant<value_ints = [-1]>()  a = Unsqueeze(rows, last)
        b = Unsqueeze(x_place, last)  i = Concat<axis = 1>(a, b)  y = ScatterND(x, i, x_new) }""",
    "If over a known condition": """g (float[N, 4] x) => (float[N, 4] y) {
        s = Shape<start = 1>(x)  four = Constant<value_ints = [4]>()  c = Equal(s, four)
        y = If(c) <then_branch = a () => (float[N, 4] u) { u = Relu(x) },
                   else_branch = b () => (float u) { u = ReduceSum(x) }> }""",
}


@pytest.mark.parametrize("name", PROVEN)
def test_graph_is_proven(name: str):
    assert proof(PROVEN[name]) == Proof(True, "", "")


#: operator -> graphs that it ends the proof of
ENDED = {
    "a detector": (
        "NonZero",
        """g (float[N, 9] x) => (float[N, 9] y) <float t = {0.5}, int64[2] to = {0, -1}> {
        m = Greater(x, t)  i = NonZero(m)  f = Cast<to = 1>(i)  s = ReduceSum(f)  y = Add(x, s) }""",
    ),
    "coupled above a threshold": (
        "ReduceMax",
        """g (float[N, 4] x) => (float[N, 4] y) <float t = {3}> {
        m = ReduceMax<keepdims = 0>(x)  c = Greater(m, t)
        y = If(c) <then_branch = a () => (float[N, 4] u) { u = Neg(x) },
                   else_branch = b () => (float[N, 4] u) { u = Relu(x) }> }""",
    ),
    "a scale over the batch": ("ReduceMax", "g (float[N, 4] x) => (float[N, 4] y) { m = ReduceMax(x)  y = Div(x, m) }"),
    "int8 quantised as it runs": (
        "DynamicQuantizeLinear",
        """g (float[N, 4] x, int8[4, 2] w) => (float[N, 2] y) {
        q, s, z = DynamicQuantizeLinear(x)  p = MatMulInteger(q, w, z)  f = Cast<to = 1>(p)  y = Mul(f, s) }""",
    ),
    "a leak of a millionth": (
        "ReduceMean",
        """g (float[N, 4] x) => (float[N, 4] y) <float e = {0.000001}> {
        m = ReduceMean<axes = [0]>(x)  d = Mul(m, e)  y = Add(x, d) }""",
    ),
    "from the fourth row on": (
        "Slice",
        """g (float[N, 4] x) => (float[N, 4] y) <int64[1] three = {3}, int64[1] end = {9999999999}, int64[1] axes = {0}> {
        late = Slice(x, three, end, axes)  m = ReduceSum(late)  y = Add(x, m) }""",
    ),
    "the number of rows": (
        "Div",
        "g (float[N, 4] x) => (float[N, 4] y) { s = Shape<end = 1>(x)  f = Cast<to = 1>(s)  y = Div(x, f) }",
    ),
    "the place of a row": (
        "Add",
        """g (float[N, 4] x) => (float[N, 4] y) <int64 zero = {0}, int64 one = {1}, int64[1] axes = {1}> {
        s = Shape<end = 1>(x)  n = Squeeze(s)  r = Range(zero, n, one)  c = Unsqueeze(r, axes)  f = Cast<to = 1>(c)
        y = Add(x, f) }""",
    ),
    "the sum of all places": (
        "CumSum",
        "g (float[N, 4] x) => (float[N, 4] y) <int64 axis = {0}> { y = CumSum(x, axis) }",
    ),
    "the row after": (
        "Concat",
        """g (float[N, L, 4] x, int64[N] x_place) => (float[N, 4] y) {
        zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()  s = Shape(x)  n = Gather(s, zero)
        e = Add(n, one)  rows = Range(one, e, one)  m = Mod(rows, n)  last = Constant<value_ints = [-1]>()
        a = Unsqueeze(m, last)  b = Unsqueeze(x_place, last)  i = Concat<axis = 1>(a, b)  y = GatherND(x, i) }""",
    ),
    "row numbers in both columns": (
        "GatherND",
        """g (float[N, L, 4] x) => (float[N, 4] y) {
        zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()  s = Shape(x)  n = Gather(s, zero)
        rows = Range(zero, n, one)  last = Constant<value_ints = [-1]>()  a = Unsqueeze(rows, last)
        i = Concat<axis = 1>(a, a)  y = GatherND(x, i) }""",
    ),
    "row numbers repeated to a second column": (
        "GatherND",
        """g (float[N, L, 4] x) => (float[N, 4] y) <int64[2] two = {1, 2}> {
        zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()  s = Shape(x)  n = Gather(s, zero)
        rows = Range(zero, n, one)  last = Constant<value_ints = [-1]>()  a = Unsqueeze(rows, last)
        i = Expand(a, two)  y = GatherND(x, i) }""",
    ),
    "row numbers in the second column": (
        "Concat",
        """g (float[N, L, 4] x, int64[N] x_place) => (float[N, 4] y) {
        zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()  s = Shape(x)  n = Gather(s, zero)
        rows = Range(zero, n, one)  last = Constant<value_ints = [-1]>()  a = Unsqueeze(rows, last)
        b = Unsqueeze(x_place, last)  i = Concat<axis = 1>(b, a)  y = GatherND(x, i) }""",
    ),
    "softmax over the rows": ("Softmax", "g (float[N, 4] x) => (float[N, 4] y) { y = Softmax<axis = 0>(x) }"),
    "rows against columns": (
        "MatMul",
        "g (float[N, 4] x) => (float[N, 4] y) { t = Transpose<perm = [1, 0]>(x)  s = MatMul(x, t)  y = MatMul(s, x) }",
    ),
    "a vector against a matrix": (
        "Add",
        "g (float[N, 4] x) => (float[N, 4] y) <int64[1] last = {1}> { m = ReduceMax<axes = [1], keepdims = 0>(x)  y = Add(x, m) }",
    ),
    "statistics of training": (
        "BatchNormalization",
        """g (float[N, 4] x, float[4] s, float[4] b, float[4] m, float[4] v) => (float[N, 4] y) {
        y, rm, rv = BatchNormalization<training_mode = 1>(x, s, b, m, v) }""",
    ),
    "a random number": (
        "RandomNormalLike",
        "g (float[N, 4] x) => (float[N, 4] y) { r = RandomNormalLike(x)  y = Add(x, r) }",
    ),
    "rows in another order": (
        "Gather",
        "g (float[N, 4] x) => (float[N, 4] y) { i = ArgMax<axis = 1, keepdims = 0>(x)  y = Gather(x, i) }",
    ),
    "sorted rows": (
        "TopK",
        "g (float[N, 4] x) => (float[N, 4] y) { n = Shape<end = 1>(x)  y, i = TopK<axis = 0>(x, n) }",
    ),
    "squeezed when there is one": ("Squeeze", "g (float[N, 4] x) => (float[N, 4] y) { y = Squeeze(x) }"),
    "positions of a maximum": (
        "MaxPool",
        "g (float[N, 1, 4] x) => (float[N, 1, 2] y, int64[N, 1, 2] i) { y, i = MaxPool<kernel_shape = [2], strides = [2]>(x) }",
    ),
    "mixed by a reshape": (
        "Reshape",
        "g (float[N, 6] x) => (float[N, 6] y) <int64[2] a = {-1, 4}, int64[2] b = {-1, 6}> { u = Reshape(x, a)  v = Softmax(u)  y = Reshape(v, b) }",
    ),
    "an output without rows": ("Relu", "g (float[N, 4] x) => (float[1] y) <float[1] w = {1}> { y = Relu(w) }"),
    "an output with rows elsewhere": (
        "Transpose",
        "g (float[N, 4] x) => (float[4, N] y) { y = Transpose<perm = [1, 0]>(x) }",
    ),
    "an operator of another domain": (
        "com.microsoft.NobodyKnows",
        "g (float[N, 4] x) => (float[N, 4] y) { y = com.microsoft.NobodyKnows(x) }",
    ),
    "a branch that a row chooses": (
        "If",
        """g (bool[N] x, float[1] w) => (float[1] y) {
        y = If(x) <then_branch = a () => (float[1] u) { u = Neg(w) }, else_branch = b () => (float[1] u) { u = Relu(w) }> }""",
    ),
    "a loop for each row": (
        "Loop",
        """g (int64[N] x) => (int64[N] y) {
        n = Size(x)
        y = Loop(n, , x) <body = b (int64 i, bool c, int64[N] v) => (bool d, int64[N] w) { d = Identity(c)  w = Add(v, v) }> }""",
    ),
}


@pytest.mark.parametrize("name", ENDED)
def test_graph_is_not_proven(name: str):
    ends_with(*ENDED[name])


def test_a_detector_of_a_fixed_batch_is_not_proven_after_the_rewrite():
    fixed = parsed(ENDED["a detector"][1].replace("[N, 9]", "[1, 9]"))
    found = prove(with_variable_rows(fixed), ["x"])
    assert not found.proven
    assert found.culprit == "NonZero (which computes 'i')"


@pytest.mark.parametrize(
    "target", ["{1, 4, 2}", "{1, -1}", "{2, 4}", "{8, -1}"], ids=["one row", "one row of any length", "fixed", "folded"]
)
def test_a_fixed_batch_in_a_reshape_is_not_proven(target: str):
    text = "g (float[N, 8] x) => (float[N, 8] y) <int64[{n}] t = {target}> { y = Reshape(x, t) }"
    count = target.count(",") + 1
    assert not proof(text.replace("{n}", str(count)).replace("{target}", target)).proven


def test_the_axes_of_softmax_follow_the_opset():
    text = "g (float[L, N, 4] x) => (float[N, 4, L] y) { y = Softmax(x) }"
    turned = "g (float[N, L, 4] x) => (float[N, L, 4] y) { t = Transpose<perm = [1, 0, 2]>(x)  s = Softmax(t)  y = Transpose<perm = [1, 0, 2]>(s) }"
    assert proof(turned, opset=13).proven
    ends_with("Softmax", turned, opset=12)
    ends_with("Softmax", text.replace("[L, N, 4]", "[N]").replace("[N, 4, L]", "[N]"), opset=13)


def test_the_limits_of_the_analysis_are_those_of_the_documentation():
    page = (Path(__file__).parents[4] / "docs/batching.md").read_text()
    assert f"{analysis.NODES_MAX:,} operators" in page
    assert f"deeper than {analysis.DEPTH_MAX} levels" in page


def test_inputs_without_rows_are_shared():
    text = "g (float[N, 4] x, float[4] w) => (float[N, 4] y) { y = Mul(x, w) }"
    assert proof(text, rows=["x"]).proven
    assert not proof(text, rows=["x", "w"]).proven
    matrix = "g (float[N, 4] x, float[M, 4] w) => (float[N, 4] y) { y = Mul(x, w) }"
    assert proof(matrix, rows=["x", "w"]).proven
    ends_with("Mul", matrix, rows=["x"])


@pytest.mark.parametrize(
    "build",
    [
        models.mlp,
        models.identity,
        models.scale,
        models.wide,
        models.fragile,
        models.add_sub,
        models.lookup,
        models.slow,
        models.variable_length,
        models.windowed,
        models.embeddings,
        models.squeezenet,
    ],
    ids=lambda build: build.__name__,
)
def test_test_models_are_proven(build, tmp_path):
    model = onnx.load(build(tmp_path / "model.onnx"))
    assert prove(model, [value.name for value in model.graph.input]) == Proof(True, "", "")


def test_a_model_of_a_fixed_batch_is_proven_after_the_rewrite(tmp_path):
    model = onnx.load(models.convolution(tmp_path / "model.onnx"))
    assert prove(with_variable_rows(model), ["image"]) == Proof(True, "", "")
    mixing = onnx.load(models.row_mixing(tmp_path / "model.onnx"))
    assert prove(with_variable_rows(mixing), ["x"]).culprit == "ReduceSum (which computes 'total')"


def named_function(name: str, body: Sequence[onnx.NodeProto]) -> onnx.FunctionProto:
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    return helper.make_function("f", name, ["a"], ["z"], list(body), imports)


def chain(nodes: Sequence[onnx.NodeProto], functions: Sequence[onnx.FunctionProto] = (), weights=()) -> onnx.ModelProto:
    """From "x" [N, 4] to the last node's output."""
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 4])]
    outputs = [helper.make_tensor_value_info(nodes[-1].output[0], onnx.TensorProto.FLOAT, None)]
    graph = helper.make_graph(list(nodes), "chain", inputs, outputs, list(weights))
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("f", 1)]
    return helper.make_model(graph, functions=list(functions), opset_imports=imports, ir_version=8)


def test_functions_are_followed_with_their_attributes():
    axis = onnx.AttributeProto(name="axis", ref_attr_name="along", type=onnx.AttributeProto.INT)
    body = helper.make_node("Softmax", ["a"], ["z"])
    body.attribute.append(axis)
    function = named_function("F", [body])
    function.attribute.append("along")
    for along, proven in ((1, True), (0, False)):
        model = chain([helper.make_node("F", ["x"], ["y"], domain="f", along=along)], [function])
        found = prove(model, ["x"])
        assert (found.proven, found.culprit) == (proven, "" if proven else "Softmax (which computes 'z')")


def test_mutually_recursive_functions_end_the_analysis():
    again = named_function("F", [helper.make_node("F", ["a"], ["z"], domain="f")])
    found = prove(chain([helper.make_node("F", ["x"], ["y"], domain="f")], [again]), ["x"])
    assert (found.proven, found.culprit) == (False, "the graph")


def test_exponential_function_calls_end_the_analysis():
    """Twenty levels of two calls each: a million operators from forty nodes."""
    functions = []
    for level in range(20):
        inner, domain = (f"F{level - 1}", "f") if level else ("Relu", "")
        calls = [helper.make_node(inner, [a], [b], domain=domain) for a, b in (("a", "b"), ("b", "z"))]
        functions.append(named_function(f"F{level}", calls))
    found = prove(chain([helper.make_node("F19", ["x"], ["y"], domain="f")], functions), ["x"])
    assert found == Proof(False, "the graph", f"it applies more than {analysis.NODES_MAX} operators")


def test_a_function_does_not_replace_an_operator_of_the_standard():
    function = helper.make_function(
        "", "Relu", ["a"], ["z"], [helper.make_node("Neg", ["a"], ["z"])], [helper.make_opsetid("", 17)]
    )
    for domain in ("", "ai.onnx"):
        found = prove(chain([helper.make_node("Relu", ["x"], ["y"], domain=domain)], [function]), ["x"])
        assert not found.proven
        assert found.culprit.startswith("Relu")


def test_large_graphs_are_proven_and_exploding_ones_end_the_analysis():
    names = ["x", *(f"a{index}" for index in range(20_000))]
    deep = [helper.make_node("Add", [a, a], [b]) for a, b in pairwise(names)]
    assert prove(chain(deep), ["x"]).proven
    axis = numpy_helper.from_array(np.array([1]), "axis")
    growing = [helper.make_node("Unsqueeze", [a, "axis"], [b]) for a, b in pairwise(names)]
    found = prove(chain(growing, weights=[axis]), ["x"])
    assert not found.proven
    assert found.reason == f"a tensor has more than {analysis.RANK_MAX} axes"


def test_growing_known_contents_end_the_analysis():
    doubling = [helper.make_node("Shape", ["x"], ["s0"])]
    doubling += [helper.make_node("Concat", [f"s{i}"] * 2, [f"s{i + 1}"], axis=0) for i in range(40)]
    assert not prove(chain([*doubling, helper.make_node("Reshape", ["x", "s40"], ["y"])]), ["x"]).proven
    squaring = [helper.make_node("Shape", ["x"], ["s0"])]
    squaring += [helper.make_node("Mul", [f"s{i}"] * 2, [f"s{i + 1}"]) for i in range(60)]
    assert not prove(chain([*squaring, helper.make_node("Expand", ["x", "s60"], ["y"])]), ["x"]).proven


MALFORMED = {
    "a constant of the wrong size": onnx.TensorProto(name="w", data_type=1, dims=[3], raw_data=b"123"),
    "a constant of an unknown type": onnx.TensorProto(name="w", data_type=99, dims=[1], raw_data=b"1234"),
    "a constant of a negative size": onnx.TensorProto(name="w", data_type=1, dims=[-1]),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_constants_end_the_proof(name: str):
    found = prove(chain([helper.make_node("Add", ["x", "w"], ["y"])], weights=[MALFORMED[name]]), ["x"])
    assert not found.proven
    assert found.reason


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("Softmax", ["x"], ["y"], axis=5),
        helper.make_node("Transpose", ["x"], ["y"], perm=[0, 0]),
        helper.make_node("Add", ["x"], ["y"], axis="text"),
        helper.make_node("Conv", ["x", "x"], ["y"]),
        helper.make_node("If", ["x"], ["y"]),
        helper.make_node("Loop", ["", "", "x"], ["y"]),
        helper.make_node("Scan", ["x"], ["y"], num_scan_inputs=7),
        helper.make_node("Einsum", ["x"], ["y"], equation="ijk->i"),
        helper.make_node("Split", ["x"], ["y", "z", "u"], axis=-9),
        helper.make_node("Relu", [], ["y"]),
        helper.make_node("Relu", ["nowhere"], ["y"]),
        helper.make_node("Relu", ["x"], ["z", "y"]),
        helper.make_node("Constant", [], ["y"]),
        helper.make_node("Gather", ["x", "x"], ["y"], axis=[1, 2]),
    ],
    ids=lambda node: node.op_type,
)
def test_malformed_nodes_end_the_proof(node: onnx.NodeProto):
    model = chain([node])
    model.graph.output[0].name = "y"
    found = prove(model, ["x"])
    assert not found.proven or node.op_type == "Add"
    assert found.proven or found.reason


def test_inputs_must_have_rows():
    model = chain([helper.make_node("Relu", ["x"], ["y"])])
    assert prove(model, ["nothing"]).culprit == "the graph"
    assert not prove(model, []).proven
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3
    assert prove(model, ["x"]) == Proof(False, "input 'x'", "its first dimension is fixed at 3")
    model.graph.input[0].type.tensor_type.ClearField("shape")
    assert prove(model, ["x"]) == Proof(False, "input 'x'", "it has no axis for rows")
