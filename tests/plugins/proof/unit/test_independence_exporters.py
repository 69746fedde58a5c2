"""Idioms of exporters are proven, and graphs that look like them and mix rows are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from millstream.plugins.proof.analysis import prove
from millstream.services.model.manifest import ROWS_MAX
from tests.kit.independence import assert_independent, load, run_alone
from tests.plugins.proof.unit.test_independence import ends_with, proof

#: all rows f as one sequence, row numbers r4, places p4, and the length l1
FLAT = """zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()  three = Constant<value_int = 3>()
        last = Constant<value_ints = [-1]>()  ends = Constant<value_ints = [1, 2, 3]>()
        front = Constant<value_ints = [0, 1, 2]>()  f = Reshape(x, last)
        s = Shape<start = 0, end = 1>(x)  n = Squeeze(s)  l1 = Shape<start = 1, end = 2>(x)  l = Squeeze(l1)
        r = Range(zero, n, one)  r4 = Unsqueeze(r, ends)  p = Range(zero, l, one)  p4 = Unsqueeze(p, front)"""

PROVEN = {
    "tf2onnx: an end that is beyond every run": f"""g (float[N, 4] x) => (float[N, 1, 4] y)
        <int64[2] starts = {{0, 0}}, int64[2] ends = {{{ROWS_MAX}, 4}}, int64[1] one = {{1}}> {{
        a = Slice(x, starts, ends)  y = Unsqueeze(a, one) }}""",
    "tf2onnx: two elements for each row, and an end beyond all": f"""g (float[N, 2] x) => (float[N, 2] y)
        <int64[1] flat = {{-1}}, int64[1] start = {{0}}, int64[1] end = {{{2 * ROWS_MAX}}}, int64[2] back = {{-1, 2}}> {{
        a = Reshape(x, flat)  b = Slice(a, start, end)  y = Reshape(b, back) }}""",
    "jax2tf: ends computed in floats, with a number for 'all'": """g (float[N, 6] x) => (float[N, 6] y)
        <int64[2] starts = {0, 0}, int64[1] six = {6}, float[2] ends = {-1000000000, 1000000000}, int64[1] zero = {0},
        int64[1] one = {1}, int64 all = {1000000000}, int64 none = {-1000000000}> {
        s = Shape(x)  n = Slice(s, zero, one)  e = Concat<axis = 0>(n, one)  f = Cast<to = 1>(e)  m = Max(f, ends)
        i = Cast<to = 7>(m)  q = Equal(i, all)  l = Less(s, zero)  c = And(q, l)  w = Where(c, none, i)
        y = Slice(x, starts, w) }""",
    "jax2tf: a step at an unknown time": """g (int64[1] at, float[N, 5, 4] x) => (float[N, 4] y)
        <int64[2] zeros = {0, 0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] four = {4}, int64[1] none = {0}> {
        k = Transpose<perm = [1, 0, 2]>(x)  s = Shape(x)  n = Slice(s, none, one)
        size = Concat<axis = 0>(one, n, four)  starts = Concat<axis = 0>(at, zeros)  ends = Add(starts, size)
        a = Slice(k, starts, ends)  shape = Concat<axis = 0>(n, four)  y = Reshape(a, shape) }""",
    "TorchScript: a length that the trace fixed": """g (float[N, L, 8] x) => (float[N, 7, 8] y)
        <int64[1] seven = {7}, int64[1] four = {4}, int64[1] two = {2}, int64[1] none = {0}, int64[1] one = {1},
        int64[1] eight = {8}> {
        t = Transpose<perm = [1, 0, 2]>(x)  s = Shape(x)  n = Slice(s, none, one)  m = Mul(n, two)
        shape = Concat<axis = 0>(seven, m, four)  h = Reshape(t, shape)
        back = Concat<axis = 0>(seven, n, eight)  j = Reshape(h, back)  y = Transpose<perm = [1, 0, 2]>(j) }""",
    "Keras: a transposed convolution whose size is restored": """g (float[N, 1, 4, 4] x, float[1, 1, 3, 3] w)
        => (float[N, 8, 8, 1] y) <int64[4] shape = {-1, 8, 8, 1}> {
        a = ConvTranspose<strides = [2, 2], pads = [0, 0, 1, 1]>(x, w)  y = Reshape(a, shape) }""",
    "PyTorch: a transposed convolution with dilation": """g (float[N, 2, 4, 5] x, float[2, 3, 2, 3] w)
        => (float[N, 462] y) <int64[2] shape = {-1, 462}> {
        a = ConvTranspose<strides = [2, 3], dilations = [3, 1], output_padding = [1, 0], pads = [0, 1, 0, 0]>(x, w)
        y = Reshape(a, shape) }""",
    "PyTorch: a mask looked up by row and place, whose shape is that of their maximum": """g (float[N, L] x)
        => (float[N, 1, 1, L] y) <int64 zero = {0}, int64 one = {1}, int64[3] ends = {1, 2, 3}, int64[3] front = {0, 1, 2},
        int64[1] last = {-1}, int64[1] none = {0}> {
        s = Shape<start = 0, end = 1>(x)  n = Squeeze(s)  t = Shape<start = 1, end = 2>(x)  l = Squeeze(t)
        r = Range(zero, n, one)  r4 = Unsqueeze(r, ends)  p = Range(zero, l, one)  p4 = Unsqueeze(p, front)
        m = Max(r4, p4)  k = Shape(m)  re = Expand(r4, k)  pe = Expand(p4, k)
        ri = Unsqueeze(re, last)  pi = Unsqueeze(pe, last)  i = Concat<axis = -1>(ri, pi)  y = GatherND(x, i) }""",
    "TorchScript: a mask looked up in all rows as one sequence": f"""g (float[N, L] x) => (float[N, 1, 1, L] y) {{ {FLAT}
        m = Mul(r4, l1)  i = Add(p4, m)  y = Gather<axis = 0>(f, i) }}""",
    "TorchScript: the first places of each row": f"""g (float[N, L] x) => (float[N, 1, 1, 3] y)
        <int64[3] few = {{2, 0, 1}}> {{ {FLAT}  m = Mul(l1, r4)  i = Add(m, few)  y = Gather<axis = 0>(f, i) }}""",
}

ENDED = {
    "places from 1 on": (
        "Gather",
        f"""g (float[N, L] x) => (float[N, 1, 1, L] y) {{ {FLAT}
        m = Mul(r4, l1)  a = Add(p4, m)  i = Add(a, one)  y = Gather<axis = 0>(f, i) }}""",
    ),
    "one place, which may be beyond the row": (
        "Gather",
        f"""g (float[N, L] x) => (float[N, 1, 1, 1] y) <int64[1] far = {{3}}> {{ {FLAT}
        m = Mul(r4, l1)  i = Add(m, far)  y = Gather<axis = 0>(f, i) }}""",
    ),
    "a place that the row itself names": (
        "Add",
        f"""g (float[N, L] x, int64[N, 1, 1, 1] at) => (float[N, 1, 1, 1] y) {{ {FLAT}
        m = Mul(r4, l1)  i = Add(m, at)  y = Gather<axis = 0>(f, i) }}""",
    ),
    "rows of another length": (
        "Gather",
        f"""g (float[N, L] x) => (float[N, 1, 1, L] y) {{ {FLAT}
        m = Mul(r4, three)  i = Add(p4, m)  y = Gather<axis = 0>(f, i) }}""",
    ),
    "a place for each row": (
        "Gather",
        f"""g (float[N, L] x) => (float[N, 1, 1, 1] y) <int64[3, 1, 1, 1] places = {{0, 1, 2}}> {{ {FLAT}
        m = Mul(r4, l1)  i = Add(m, places)  y = Gather<axis = 0>(f, i) }}""",
    ),
    "row numbers and places exchanged": (
        "Gather",
        f"""g (float[N, L] x) => (float[N, 1, 1, L] y) {{ {FLAT}
        m = Mul(p4, l1)  i = Add(r4, m)  y = Gather<axis = 0>(f, i) }}""",
    ),
    "an end that a run may pass": (
        "Slice",
        f"""g (float[N, 4] x) => (float[N, 4] y) <int64[1] start = {{0}}, int64[1] end = {{{ROWS_MAX - 1}}}> {{
        y = Slice(x, start, end) }}""",
    ),
    "two elements for each row, and an end that a run may pass": (
        "Slice",
        f"""g (float[N, 2] x) => (float[N, 2] y)
        <int64[1] flat = {{-1}}, int64[1] start = {{0}}, int64[1] end = {{{ROWS_MAX}}}, int64[2] back = {{-1, 2}}> {{
        a = Reshape(x, flat)  b = Slice(a, start, end)  y = Reshape(b, back) }}""",
    ),
    "any number of elements for each row, and an end that they may pass": (
        "Slice",
        """g (float[N, L] x) => (float[N, L] y)
        <int64[1] flat = {-1}, int64[1] start = {0}, int64[1] end = {1000000000}> {
        a = Reshape(x, flat)  b = Slice(a, start, end)  s = Shape(x)  y = Reshape(b, s) }""",
    ),
    "an end that is the number of rows, or less": (
        "Slice",
        """g (float[N, 4] x) => (float[N, 4] y)
        <int64[1] start = {0}, int64[1] one = {1}, float[1] most = {64}> {
        s = Shape(x)  n = Slice(s, start, one)  f = Cast<to = 1>(n)  m = Min(f, most)  e = Cast<to = 7>(m)
        y = Slice(x, start, e) }""",
    ),
    "a start that is not known": (
        "Slice",
        """g (float[N, 4] x, int64[1] at) => (float[N, 4] y) <int64[1] end = {100000}, int64[1] one = {1}> {
        zero = Sub(at, at)  two = Concat<axis = 0>(zero, zero)  y = Slice(x, two, end) }""",
    ),
    "a condition on the number of rows": (
        "Slice",
        """g (float[N, 4] x) => (float[N, 4] y)
        <int64[1] start = {0}, int64[1] one = {1}, int64[1] many = {64}, int64[1] all = {100000}> {
        s = Shape(x)  n = Slice(s, start, one)  c = Equal(n, many)  e = Where(c, one, all)  y = Slice(x, start, e) }""",
    ),
    "rows and columns exchanged": (
        "Reshape",
        """g (float[N, 4] x) => (float[4, N] y) <int64[1] start = {0}, int64[1] one = {1}, int64[1] four = {4}> {
        s = Shape(x)  n = Slice(s, start, one)  t = Concat<axis = 0>(four, n)  y = Reshape(x, t) }""",
    ),
    "a fixed length before the rows, and others behind them": (
        "Reshape",
        """g (float[N, L, 8] x) => (float[7, N, 8] y)
        <int64[1] start = {0}, int64[1] one = {1}, int64[1] eight = {8}, int64[1] seven = {7}> {
        s = Shape(x)  n = Slice(s, start, one)  t = Concat<axis = 0>(seven, n, eight)  y = Reshape(x, t) }""",
    ),
    "a transposed convolution whose size is another": (
        "Reshape",
        """g (float[N, 1, 4, 4] x, float[1, 1, 3, 3] w) => (float[N, 9, 9] y) <int64[3] shape = {-1, 9, 9}> {
        a = ConvTranspose<strides = [2, 2], pads = [0, 0, 1, 1]>(x, w)  y = Reshape(a, shape) }""",
    ),
    "stop words": (
        "StringNormalizer",
        """g (string[N] x) => (string[N] y) { y = StringNormalizer<stopwords = ["a"], case_change_action = "LOWER">(x) }""",
    ),
    "a matrix of texts": (
        "StringNormalizer",
        'g (string[N, 1] x) => (string[N, 1] y) { y = StringNormalizer<case_change_action = "LOWER">(x) }',
    ),
}


@pytest.mark.parametrize("name", PROVEN)
def test_an_idiom_is_proven_and_its_rows_are_independent(name: str) -> None:
    assert proof(PROVEN[name], rows=["x"]).proven
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {PROVEN[name]}')
    random = np.random.default_rng(3)
    feeds = {}
    for given in model.graph.input:
        dims = given.type.tensor_type.shape.dim
        shape = [dim.dim_value or {"L": 7, "N": 4}[dim.dim_param] for dim in dims]
        whole = given.type.tensor_type.elem_type == TensorProto.INT64
        feeds[given.name] = np.full(shape, 2) if whole else random.standard_normal(shape).astype(np.float32)
    running = load(model)
    assert_independent(running, feeds, ["x"], run_alone(running, feeds, ["x"]))


@pytest.mark.parametrize(("labels", "intercepts"), [(2, 1), (2, 2), (3, 2), (3, 3), (3, 1)])
def test_scores_of_a_linear_classifier_have_the_columns_that_the_analysis_assumes(labels: int, intercepts: int) -> None:
    attributes: dict[str, Any] = {
        "classlabels_ints": list(range(labels)),
        "coefficients": [0.5] * 4 * intercepts,
        "intercepts": [0.1] * intercepts,
    }
    nodes = [
        helper.make_node("LinearClassifier", ["x"], ["label", "scores"], domain="ai.onnx.ml", **attributes),
        helper.make_node("Reshape", ["scores", "shape"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, 1, ["N", 4 if name == "x" else None]) for name in "xy"]
    shape = helper.make_tensor("shape", TensorProto.INT64, [2], [-1, intercepts])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 1)]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [shape])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    found = prove(model, ["x"])
    assert found.proven == (intercepts > 1)
    if found.proven:
        feeds = {"x": np.random.default_rng(4).standard_normal((4, 4)).astype(np.float32)}
        running = load(model)
        assert_independent(running, feeds, ["x"], run_alone(running, feeds, ["x"]))


@pytest.mark.parametrize("name", ENDED)
def test_what_only_looks_like_an_idiom_is_not_proven(name: str) -> None:
    operator, text = ENDED[name]
    ends_with(operator, text, rows=["x", "at"] if "int64[N" in text else ["x"])


def texts(filler: str, read: str = "tokens", width: str = "") -> onnx.ModelProto:
    """Return a model of texts as skl2onnx writes it; `read`: what is counted; `width`: an operator on the tokens."""
    tokenizer: dict[str, Any] = {"pad_value": filler, "mark": 0, "mincharnum": 1, "tokenexp": "[a-z#]+"}
    counter: dict[str, Any] = {
        "mode": "TF",
        "max_gram_length": 2,
        "min_gram_length": 1,
        "max_skip_count": 1,
        "ngram_counts": [0, 3],
        "ngram_indexes": [0, 1, 2, 3],
        "pool_strings": ["red", "cat", "#", "red", "cat"],
    }
    nodes = [
        helper.make_node("StringNormalizer", ["x"], ["lower"], case_change_action="LOWER", locale="C.UTF-8"),
        helper.make_node("Tokenizer", ["lower"], ["tokens"], domain="com.microsoft", **tokenizer),
        helper.make_node("Flatten", ["tokens"], ["flat"]),
        helper.make_node("TfIdfVectorizer", [read], ["counts"], **counter),
        *([helper.make_node(width, ["tokens"], ["y"])] if width else [helper.make_node("Identity", ["counts"], ["y"])]),
    ]
    given = helper.make_tensor_value_info("x", TensorProto.STRING, ["N"])
    kind = {"": TensorProto.FLOAT, "Shape": TensorProto.INT64}.get(width, TensorProto.STRING)
    result = helper.make_tensor_value_info("y", kind, None)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph(nodes, "g", [given], [result]), opset_imports=opsets, ir_version=8)


@pytest.mark.parametrize("read", ["tokens", "flat"])
def test_counts_of_tokens_are_proven_and_independent_of_the_longest_text(read: str) -> None:
    model = texts("$", read)
    assert prove(model, ["x"]).proven
    feeds = {"x": np.array(["Red cat", "", "# # # #", "cat Red cat red dog cat", "?", "red"], object)}
    running = load(model)
    assert_independent(running, feeds, ["x"], run_alone(running, feeds, ["x"]))


@pytest.mark.parametrize(("filler", "width"), [("#", ""), ("$", "Identity"), ("$", "Shape")])
def test_tokens_that_fill_and_are_counted_or_are_read_otherwise_are_not_proven(filler: str, width: str) -> None:
    found = prove(texts(filler, width=width), ["x"])
    assert (found.proven, found.reason) == (False, "its output is as wide as the longest text of the batch")
