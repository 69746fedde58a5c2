"""The proof that rows do not influence each other: which graphs it accepts, and which operator ends it elsewhere.

Graphs are written in ONNX's text form. Inputs whose names begin with "x" have rows, unless the test says otherwise.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import onnx
import pytest

from services.compiler.independence import Proof, analysis, prove
from services.compiler.rewrite import with_variable_rows
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
def test_is_proven(name: str):
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
    "an operator of somebody else": (
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
def test_is_not_proven(name: str):
    ends_with(*ENDED[name])


def test_a_detector_of_a_fixed_batch_is_not_proven_after_the_rewrite():
    fixed = parsed(ENDED["a detector"][1].replace("[N, 9]", "[1, 9]"))
    for leading in (0, -1):
        found = prove(with_variable_rows(fixed, leading), ["x"])
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
    page = (Path(__file__).parents[2] / "docs/batching.md").read_text()
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
def test_models_of_the_tests_are_proven(build, tmp_path):
    model = onnx.load(build(tmp_path / "model.onnx"))
    assert prove(model, [value.name for value in model.graph.input]) == Proof(True, "", "")


def test_a_model_of_a_fixed_batch_is_proven_after_the_rewrite(tmp_path):
    model = onnx.load(models.convolution(tmp_path / "model.onnx"))
    assert prove(with_variable_rows(model, 0), ["image"]) == Proof(True, "", "")
    mixing = onnx.load(models.row_mixing(tmp_path / "model.onnx"))
    assert prove(with_variable_rows(mixing, 0), ["x"]).culprit == "ReduceSum (which computes 'total')"
