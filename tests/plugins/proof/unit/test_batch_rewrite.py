"""Exports with a batch fixed at 1 take any number of rows after the rewrite, and answer as before."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from millstream.plugins.proof.analysis import prove
from millstream.plugins.proof.batch_rewrite import with_variable_rows
from tests.kit.independence import assert_independent, load, run_alone

#: as PyTorch's exporter writes them for an example of one row
REWRITTEN = {
    "a view of one row": """g (float[1, 2, 3] x, float[6, 4] w) => (float[1, 4] y) <int64[2] view = {1, -1}> {
        a = Reshape<allowzero = 1>(x, view)  y = MatMul(a, w) }""",
    "heads between rows and features": """g (float[1, 5, 8] x) => (float[1, 5, 8] y)
        <int64[4] heads = {1, 5, 2, 4}, int64[3] merged = {-1, 5, 4}, int64[4] split = {1, 2, 4, 5},
        int64[3] view = {1, 5, 8}> {
        a = Reshape<allowzero = 1>(x, heads)  q = Transpose<perm = [0, 2, 1, 3]>(a)  k = Reshape(q, merged)
        t = Transpose<perm = [0, 2, 1]>(k)  u = Reshape(t, split)  m = MatMul(q, u)  v = MatMul(m, q)
        b = Transpose<perm = [0, 2, 1, 3]>(v)  y = Reshape<allowzero = 1>(b, view) }""",
    "heads of rows on the second axis": """g (float[1, 5, 8] x, float[8, 8] w) => (float[1, 5, 8] y)
        <int64[3] heads = {5, 2, 4}, int64[4] split = {1, 2, 5, 4}, int64[2] flat = {5, 8}, int64[3] back = {5, 1, 8}> {
        s = Transpose<perm = [1, 0, 2]>(x)  h = Reshape(s, heads)  t = Transpose<perm = [1, 0, 2]>(h)
        a = Reshape(t, split)  m = Softmax(a)  p = Transpose<perm = [2, 0, 1, 3]>(m)  f = Reshape(p, flat)
        l = MatMul(f, w)  b = Reshape(l, back)  y = Transpose<perm = [1, 0, 2]>(b) }""",
    "a token in front of all others": """g (float[1, 2, 3] x) => (float[1, 3, 3] y) <float[1, 1, 3] token = {1, 2, 3}> {
        y = Concat<axis = 1>(token, x) }""",
    "a stored state": """g (float[1, 5, 3] x, float[1, 12, 3] w, float[1, 12, 4] r) => (float[1, 4] y)
        <float[1, 1, 4] state = {1, 2, 3, 4}, int64[1] none = {0}> {
        s = Transpose<perm = [1, 0, 2]>(x)  a, h = GRU<hidden_size = 4>(s, w, r, , , state)  y = Squeeze(h, none) }""",
    "two stored states": """g (float[1, 5, 3] x, float[1, 16, 3] w, float[1, 16, 4] r) => (float[1, 4] y)
        <float[1, 1, 4] state = {1, 2, 3, 4}, int64[1] none = {0}> {
        s = Transpose<perm = [1, 0, 2]>(x)  a, h, c = LSTM<hidden_size = 4>(s, w, r, , , state, state)
        y = Squeeze(h, none) }""",
    "a mask looked up at row 0": """g (float[1, 3] x) => (float[1, 1, 3] y)
        <int64[1, 1, 3, 2] places = {0, 0, 0, 2, 0, 1}> { y = GatherND(x, places) }""",
    "a stored table that each row reads": """g (float[1, 3] x) => (float[1, 3] y)
        <float[1, 4] table = {5, 6, 7, 8}, int64 axis = {1}> {
        b = Abs(x)  c = Cast<to = 7>(b)  y = GatherElements<axis = 1>(table, c) }""",
    "an image of a fixed size": """g (float[1, 2, 3, 3] x) => (float[1, 2, 6, 5] y) <int64[4] sizes = {1, 2, 6, 5}> {
        y = Resize<mode = "nearest">(x, , , sizes) }""",
}
MIXING = {
    "a mean over the batch": "g (float[1, 4] x) => (float[1, 4] y) { m = ReduceMean<axes = [0]>(x)  y = Sub(x, m) }",
    "a reshape that moves columns to the rows' axis": """g (float[1, 4] x, float[1, 4] w) => (float[1, 4] y)
        <int64[2] shape = {4, 1}, int64[2] back = {1, 4}> {
        a = Reshape(x, shape)  b = MatMul(w, a)  c = Mul(a, b)  y = Reshape(c, back) }""",
    "a scan along the batch": """g (float[1, 4] x) => (float[1, 4] y) <int64 axis = {0}> { y = CumSum(x, axis) }""",
    "rows as the time of a GRU": """g (float[1, 5, 3] x, float[1, 12, 3] w, float[1, 12, 4] r) => (float[1, 1, 5, 4] y)
        <float[1, 5, 4] state = {1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3, 4}> {
        y, h = GRU<hidden_size = 4>(x, w, r, , , state) }""",
}


def parsed(text: str) -> onnx.ModelProto:
    """Return the model, with random weights in place of all inputs but x."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
    random = np.random.default_rng(6)
    for given in list(model.graph.input):
        if given.name != "x":
            shape = [dim.dim_value for dim in given.type.tensor_type.shape.dim]
            weights = random.standard_normal(shape).astype(np.float32)
            model.graph.initializer.append(onnx.numpy_helper.from_array(weights, given.name))
            model.graph.input.remove(given)
    return model


@pytest.mark.parametrize("name", REWRITTEN)
def test_an_export_with_a_batch_of_one_takes_any_number_of_rows(name: str) -> None:
    model = parsed(REWRITTEN[name])
    rewritten = with_variable_rows(model)
    assert prove(rewritten, ["x"]).proven
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    feeds = {"x": np.random.default_rng(7).standard_normal([4, *shape[1:]]).astype(np.float32)}
    assert_independent(load(rewritten), feeds, ["x"], run_alone(load(model), feeds, ["x"]))


@pytest.mark.parametrize("name", MIXING)
def test_rows_that_would_influence_each_other_are_not_proven(name: str) -> None:
    assert not prove(with_variable_rows(parsed(MIXING[name])), ["x"]).proven
