"""Unusual attributes, operands and sizes that ONNX Runtime interprets in its own way: none leads to a proof."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from millstream.plugins.proof.analysis import prove
from millstream.services.ingest.proof import Proof
from tests.kit.independence import load
from tests.plugins.proof.unit.test_independence import chain, ends_with, named_function, parsed, proof
from tests.plugins.proof.unit.test_independence_hostile import SIZE

ODD = {
    "no axes to squeeze": (
        "Squeeze",
        "g (float[N, 1, 4] x) => (float[N, 1, 4] y) <int64[0] none = {}> { y = Squeeze(x, none) }",
    ),
    "a flag of two for no axes": (
        "ReduceSum",
        "g (float[N, 4] x) => (float[N, 4] y) { y = ReduceSum<noop_with_empty_axes = 2>(x) }",
    ),
    "a flag of two for dimensions": (
        "ReduceSum",
        "g (float[N, 4] x) => (float[N, 1] y) <int64[1] a = {1}> { y = ReduceSum<keepdims = 2>(x, a) }",
    ),
    "a flag of two for sizes of zero": (
        "Reshape",
        "g (float[N, 4] x) => (float[N, 4] y) <int64[2] s = {0, 4}> { y = Reshape<allowzero = 2>(x, s) }",
    ),
    "a cast that writes nothing": ("Cast", "g (bool[N, 4] x) => (float[N, 4] y) { y = Cast<to = 1, saturate = 3>(x) }"),
    "an operand left out": ("Sum", 'g (float[N, 4] x) => (float[N, 4] y) { y = Sum(x, "", x) }'),
    "only the scale has rows": (
        "LayerNormalization",
        "g (float[N, 3, 4] x, float[1, 3, 4] w) => (float[N, 3, 4] y) { y = LayerNormalization(w, x) }",
    ),
    "only what is added has rows": (
        "Gemm",
        "g (float[N, 4] x, float[1, 3] a, float[3, 4] b) => (float[N, 4] y) { y = Gemm(a, b, x) }",
    ),
    "only the bias has rows": (
        "com.microsoft.FastGelu",
        "g (float[N] x, float[1, 1] w) => (float[N, 1] y) { u = com.microsoft.FastGelu(w, x)  y = Transpose(u) }",
    ),
    "a bias for a last axis that is the rows": (
        "com.microsoft.BiasGelu",
        "g (float[N] x, float[1] w) => (float[N] y) { y = com.microsoft.BiasGelu(x, w) }",
    ),
    "keys of other rows by their number": (
        "com.microsoft.MultiHeadAttention",
        """g (float[N, 1, 8] x, float[N, 2, 3, 4] x_keys, int32[N, 1, 4] x_beams) => (float[N, 1, 8] y) {
        y = com.microsoft.MultiHeadAttention<num_heads = 2>(x, x, x, , , , x_keys, x_keys, , x_beams) }""",
    ),
    "a size that overflows": (
        "Reshape",
        f"""g (float[N, K, 4] x) => (float[N, 2, 6] y) <int64[1] huge = {{4611686018427387904}}, int64[1] six = {{6}}> {{ {SIZE}
        k = Shape<start = 1, end = 2>(x)  a = Mul(k, huge)  b = Div(a, huge)  t = Transpose<perm = [1, 0, 2]>(x)
        to = Concat<axis = 0>(b, n1, six)  r = Reshape(t, to)  y = Transpose<perm = [1, 0, 2]>(r) }}""",
    ),
    "a size whose powers overflow": (
        "Reshape",
        f"""g (float[N, K, 4] x) => (float[N, 2, 6] y) <int64[1] six = {{6}}> {{ {SIZE}
        k = Shape<start = 1, end = 2>(x)  p = Mul(k, k)  q = Mul(p, p)  r = Mul(q, q)  u = Mul(r, k)  b = Div(u, r)
        t = Transpose<perm = [1, 0, 2]>(x)  to = Concat<axis = 0>(b, n1, six)  v = Reshape(t, to)
        y = Transpose<perm = [1, 0, 2]>(v) }}""",
    ),
    "row numbers once, then other numbers": (
        "Gather",
        f"""g (float[N, 4] x, int64[N] x_place) => (float[N, 4] y) <int64 two = {{2}}, int64[1] column = {{1}}, int64[2] wide = {{1, 2}}> {{ {SIZE}
        numbers = Range(zero, n, one)  last = Constant<value_ints = [-1]>()  a = Unsqueeze(numbers, last)
        b = Unsqueeze(x_place, last)  first = Expand(a, wide)
        k, y = Loop(two, , first, x) <body = t (int64 i, bool c, int64[N, 2] k, float[N, 4] h) => (bool d, int64[N, 2] l, float[N, 4] u) {{
            d = Identity(c)  g = Gather(x, k)  s = ReduceSum<keepdims = 0>(g, column)  u = Add(h, s)  l = Concat<axis = 1>(a, b) }}> }}""",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_unusual_operands_end_the_proof(name: str):
    ends_with(*ODD[name], opset=19 if "cast" in name else 17)


@pytest.mark.parametrize(
    ("operator", "text"),
    [
        (
            "Resize",
            "g (float[N, 1, 4, 4] x) => (float[N, 1, 4, 4] y) <float[4] s = {2, 1, 1, 1}> { y = Resize(x, , s) }",
        ),
        ("CenterCropPad", "g (float[N, 4] x) => (float[N, 4] y) <int64[2] s = {1, 4}> { y = CenterCropPad(x, s) }"),
        ("MeanVarianceNormalization", "g (float[N, 4] x) => (float[N, 4] y) { y = MeanVarianceNormalization(x) }"),
    ],
)
def test_an_empty_list_of_axes_differs_from_absent_axes(operator: str, text: str):
    model = parsed(text, opset=18)
    model.graph.node[0].attribute.append(onnx.AttributeProto(name="axes", type=onnx.AttributeProto.INTS))
    found = prove(model, ["x"])
    assert not found.proven
    assert found.culprit.startswith(operator)


def test_an_attribute_that_refers_to_no_function_ends_the_proof():
    """ONNX Runtime uses the value stored with the reference: here axis 0 instead of the default."""
    model = parsed("g (float[N, 4] x) => (float[N, 4] y) { y = Softmax<axis = 0>(x) }")
    model.graph.node[0].attribute[0].ref_attr_name = "along"
    found = prove(model, ["x"])
    assert (found.proven, found.culprit) == (False, "Softmax (which computes 'y')")


def test_a_sparse_default_does_not_replace_an_input_with_rows():
    model = parsed(
        "g (float[N, 4] x, float[N, 4] x2) => (float[N, 4] y) <int64[1] z = {0}> { m = ReduceSum(x2, z)  y = Add(x, m) }"
    )
    values, indices = numpy_helper.from_array(np.ones(1, np.float32), "x2"), numpy_helper.from_array(np.array([[0, 0]]))
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [3, 4]))
    assert prove(model, ["x", "x2"]).culprit == "ReduceSum (which computes 'm')"


def test_a_multiplied_and_divided_shape_is_still_known():
    text = f"""g (float[N, K, 8] x) => (float[N, K, 8] y) <int64[1] four = {{4}}, int64[1] two = {{2}}> {{ {SIZE}
        k = Shape<start = 1, end = 2>(x)  rows = Mul(n1, k)  all = Mul(rows, four)  a = Concat<axis = 0>(all, two)
        u = Reshape(x, a)  v = Relu(u)  y = Reshape(v, s) }}"""
    assert proof(text) == Proof(True, "", "")
    running = load(parsed(text))
    assert running.run(None, {"x": np.ones((3, 5, 8), np.float32)})[0].shape == (3, 5, 8)


def test_exponentially_growing_sizes_end_the_analysis():
    """Twenty axes of three terms each are one size of 3^20 terms; twenty thousand repetitions one of a million bits."""
    pads = numpy_helper.from_array(np.ones(64, np.int64), "pads")
    wide = helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [f"d{axis}" for axis in range(32)])
    flat = [helper.make_node("Pad", ["w", "pads"], ["p"]), helper.make_node("Flatten", ["p"], ["f"])]
    model = chain([*flat, helper.make_node("Add", ["x", "f"], ["y"])], weights=[pads])
    model.graph.input.append(wide)
    assert not prove(model, ["x"]).proven
    repeats = numpy_helper.from_array(np.array([2**62, 1]), "repeats")
    tiles = [helper.make_node("Tile", [f"t{i}", "repeats"], [f"t{i + 1}"]) for i in range(20_000)]
    tiled = chain([helper.make_node("Relu", ["x"], ["t0"]), *tiles], weights=[repeats])
    assert prove(tiled, ["x"]).reason == "the sizes of its operands are too large an expression"


def test_long_attributes_in_functions_count_once_per_call():
    body = helper.make_node("Scaler", ["a"], ["z"], domain="ai.onnx.ml", scale=[1.0] * 50_000, offset=[0.0])
    calls = [helper.make_node("F", [f"a{i}" if i else "x"], [f"a{i + 1}"], domain="f") for i in range(700)]
    found = prove(chain(calls, [named_function("F", [body])]), ["x"])
    assert not found.proven
    assert found.culprit == "the graph"


def test_a_function_of_another_opset_ends_the_proof():
    """ONNX Runtime uses the model's opset: before opset 13 Softmax works along all axes from 1 on."""
    turned = """g (float[N, 3, 4] x) => (float[N, 3, 4] y) {
        t = Transpose<perm = [1, 0, 2]>(x)  u = f.F(t)  y = Transpose<perm = [1, 0, 2]>(u) }"""
    function = named_function("F", [helper.make_node("Softmax", ["a"], ["z"])])
    for opset, proven in ((17, True), (12, False)):
        model = parsed(turned, opset)
        model.opset_import.append(helper.make_opsetid("f", 1))
        model.functions.append(function)
        assert prove(model, ["x"]).proven is proven


def test_a_function_does_not_replace_an_operator_of_the_runtime():
    body, imports = helper.make_node("Identity", ["a"], ["z"]), [helper.make_opsetid("", 17)]
    domain = "com.microsoft.nchwc"
    function = helper.make_function(domain, "GlobalMaxPool", ["a"], ["z"], [body], imports)
    model = chain([helper.make_node("GlobalMaxPool", ["x"], ["y"], domain=domain)], [function])
    assert prove(model, ["x"]).culprit.startswith(domain)
