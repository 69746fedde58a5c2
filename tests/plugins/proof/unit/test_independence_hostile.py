"""Graphs that mix rows in ways that are hard to detect: none is proven, and the error names the operator."""

from __future__ import annotations

import pytest

from tests.plugins.proof.unit.test_independence import ends_with

#: the number of rows as a scalar n and as a vector n1
SIZE = """s = Shape(x)  zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()
        n = Gather(s, zero)  axes = Constant<value_ints = [0]>()  n1 = Unsqueeze(n, axes)"""

COUPLED = {
    "Scan goes through the rows": (
        "Scan",
        """g (float[N, 4] x) => (float[N, 4] y) <float[4] first = {0, 0, 0, 0}> {
        last, y = Scan<num_scan_inputs = 1, body = b (float[4] h, float[4] e) => (float[4] i, float[4] o) {
            i = Add(h, e)  o = Identity(i) }>(first, x) }""",
    ),
    "an LSTM whose time is the batch": (
        "LSTM",
        """g (float[N, 5, 3] x, float[1, 16, 3] w, float[1, 16, 4] r) => (float[N, 1, 5, 4] y) {
        y, h, c = LSTM<hidden_size = 4>(x, w, r) }""",
    ),
    "a state that all rows share": (
        "LSTM",
        """g (float[N, 5, 3] x, float[1, 16, 3] w, float[1, 16, 4] r, float[1, 5, 4] h0) => (float[N, 1, 5, 4] y) {
        t = Transpose<perm = [1, 0, 2]>(x)  a, h, c = LSTM<hidden_size = 4>(t, w, r, , , h0, h0)
        y = Transpose<perm = [2, 1, 0, 3]>(a) }""",
    ),
    "a scale for each row": (
        "QuantizeLinear",
        """g (float[N, 4] x, float[3] s, uint8[3] z) => (uint8[N, 4] y) { y = QuantizeLinear<axis = 0>(x, s, z) }""",
    ),
    "a scale computed from the batch": (
        "ReduceMax",
        """g (float[N, 4] x, uint8 z) => (uint8[N, 4] y) { m = ReduceMax<keepdims = 0>(x)  y = QuantizeLinear(x, m, z) }""",
    ),
    "another size of the batch": (
        "Resize",
        """g (float[N, 1, 4, 4] x) => (float[N, 1, 4, 4] y) <float[4] scales = {2, 1, 1, 1}, float[4] back = {0.5, 1, 1, 1}> {
        a = Resize(x, , scales)  y = Resize(a, , back) }""",
    ),
    "an image as wide as the batch is large": (
        "Resize",
        f"""g (float[N, 1, 4, 4] x) => (float[N, 1, 4, W] y) {{ {SIZE}  three = Constant<value_ints = [3]>()
        front = Slice(s, axes, three)  sizes = Concat<axis = 0>(front, n1)  y = Resize(x, , , sizes) }}""",
    ),
    "a scale of one for a cropped batch": (
        "Resize",
        """g (float[N, 1, 4, 4] x, float[8] roi) => (float[N, 1, 4, 4] y) <float[4] scales = {1, 1, 1, 1}> {
        y = Resize<coordinate_transformation_mode = "tf_crop_and_resize">(x, roi, scales) }""",
    ),
    "batches of any shape in one sum": (
        "Einsum",
        'g (float[N, 4] x) => (float[N, 4] y) { y = Einsum<equation = "ij,kj->ij">(x, x) }',
    ),
    "the diagonal of the batch": (
        "Einsum",
        'g (float[N, 4] x) => (float[N] y) { t = Einsum<equation = "ij,kj->ik">(x, x)  y = Einsum<equation = "ii->i">(t) }',
    ),
    "keys of another row": (
        "MatMul",
        """g (float[N, 4, 2] x) => (float[N, 4, 4] y) { k = Transpose<perm = [1, 2, 0]>(x)  y = MatMul(x, k) }""",
    ),
    "heads and rows in the wrong order": (
        "Reshape",
        """g (float[N, 2, 3, 4] x) => (float[N, 2, 3, 4] y) <int64[3] fold = {-1, 3, 4}, int64[4] back = {-1, 2, 3, 4}> {
        t = Transpose<perm = [1, 0, 2, 3]>(x)  a = Reshape(t, fold)  y = Reshape(a, back) }""",
    ),
    "a mask of one row for all heads of all": (
        "Add",
        """g (float[N, 2, 3, 3] x, float[N, 3, 3] x_mask) => (float[N, 2, 3, 3] y) { y = Add(x, x_mask) }""",
    ),
    "a weight as long as a batch": ("Mul", "g (float[N, 4] x, float[3, 1] w) => (float[N, 4] y) { y = Mul(x, w) }"),
    "a weight of unknown length": ("Mul", "g (float[N, 4] x, float[M, 1] w) => (float[N, 4] y) { y = Mul(x, w) }"),
    "a weight of unknown rank": (
        "Mul",
        "g (float[N, 4] x, float[M, K] w) => (float[N, 4] y) { u = Squeeze(w)  y = Mul(x, u) }",
    ),
    "a branch for a batch of one": (
        "If",
        f"""g (float[N, 4] x) => (float[N, 4] y) {{ {SIZE}  c = Equal(n, one)
        y = If(c) <then_branch = a () => (float[N, 4] u) {{ u = Neg(x) }},
                   else_branch = b () => (float[N, 4] u) {{ u = Relu(x) }}> }}""",
    ),
    "a choice for a batch of one": (
        "Where",
        f"g (float[N, 4] x) => (float[N, 4] y) {{ {SIZE}  c = Equal(n, one)  z = Neg(x)  y = Where(c, x, z) }}",
    ),
    "the number of rows through a power": (
        "Mul",
        f"""g (float[N, 4] x) => (float[N, 4] y) {{ {SIZE}  f = Cast<to = 1>(n1)  p = Pow(f, f)  q = Sigmoid(p)  y = Mul(x, q) }}""",
    ),
    "the number of rows as a number of columns": (
        "Expand",
        f"""g (float[N, 1] x) => (float[N, 1] y) <int64[1] column = {{1}}> {{ {SIZE}
        t = Concat<axis = 0>(n1, n1)  wide = Expand(x, t)  y = ReduceSum(wide, column) }}""",
    ),
    "a sum of ones for each row": (
        "ReduceSum",
        f"""g (float[N, 4] x) => (float[N, 4] y) {{ {SIZE}  ones = ConstantOfShape(n1)  c = Cos(ones)  t = ReduceSum<keepdims = 0>(c)  y = Mul(x, t) }}""",
    ),
    "a part that begins at the number of rows": (
        "Slice",
        f"""g (float[N, 9] x) => (float[N, 1] y) <int64[1] column = {{1}}> {{ {SIZE}
        e = Add(n1, n1)  part = Slice(x, n1, e, column)  y = ReduceSum(part, column) }}""",
    ),
    "rows turned round": (
        "Slice",
        """g (float[N, 4] x) => (float[N, 4] y) <int64[1] start = {-1}, int64[1] end = {-9223372036854775807}, int64[1] axis = {0}, int64[1] step = {-1}> {
        y = Slice(x, start, end, axis, step) }""",
    ),
    "every row but the last, and the last": (
        "Slice",
        """g (float[N, 4] x) => (float[N, 4] y) <int64[1] zero = {0}, int64[1] last = {-1}, int64[1] end = {9999999999}> {
        a = Slice(x, zero, last, zero)  b = Slice(x, last, end, zero)  y = Concat<axis = 0>(b, a) }""",
    ),
    "rows moved up by a pad": (
        "Pad",
        """g (float[N, 4] x) => (float[N, 4] y) <int64[4] pads = {1, 0, -1, 0}> { y = Pad(x, pads) }""",
    ),
    "rows that are written over": (
        "ScatterND",
        """g (float[N, 4] x, int64[1, 1] i, float[1, 4] u) => (float[N, 4] y) { y = ScatterND(x, i, u) }""",
    ),
    "rows written where a row says": (
        "ScatterElements",
        """g (float[N, 4] x, int64[N, 4] x_places) => (float[N, 4] y) { y = ScatterElements<axis = 0>(x, x_places, x) }""",
    ),
    "a state that becomes a sum of all": (
        "ReduceSum",
        """g (float[N, 4] x) => (float[N, 4] y) <int64 five = {5}> {
        y = Loop(five, , x) <body = b (int64 i, bool c, float[N, 4] h) => (bool d, float[N, 4] u) {
            d = Identity(c)  t = ReduceSum(h)  u = Add(h, t) }> }""",
    ),
    "a loop that ends when one row is large": (
        "Loop",
        """g (float[N, 4] x) => (float[N, 4] y) <int64 many = {50}, float limit = {9}> {
        y = Loop(many, , x) <body = b (int64 i, bool c, float[N, 4] h) => (bool d, float[N, 4] u) {
            u = Add(h, h)  m = ReduceMax<keepdims = 0>(u)  d = Less(m, limit) }> }""",
    ),
    "a state that changes places": (
        "a Loop, Scan or If",
        """g (float[N, 4] x) => (float[N, 4] y) <int64 two = {2}> {
        y = Loop(two, , x) <body = b (int64 i, bool c, float[A, B] h) => (bool d, float[B, A] u) {
            d = Identity(c)  u = Transpose<perm = [1, 0]>(h) }> }""",
    ),
    "two states that pass a sum on": (
        "ReduceSum",
        """g (float[N, 4] x) => (float[N, 4] y) <int64 five = {5}, float zero = {0}> {
        y, last = Loop(five, , x, zero) <body = b (int64 i, bool c, float[N, 4] h, float t) => (bool d, float[N, 4] u, float v) {
            d = Identity(c)  u = Add(h, t)  v = ReduceSum<keepdims = 0>(h) }> }""",
    ),
    "dropout that trains": (
        "Dropout",
        "g (float[N, 4] x) => (float[N, 4] y) <float half = {0.5}, bool train = {1}> { y, m = Dropout(x, half, train) }",
    ),
    "dropout of a constant": (
        "Dropout",
        "g (float[N, 4] x, float[4] w) => (float[N, 4] y) <float half = {0.5}, bool train = {1}> { d, m = Dropout(w, half, train)  y = Add(x, d) }",
    ),
    "a random constant": (
        "RandomUniform",
        "g (float[N, 4] x) => (float[N, 4] y) { r = RandomUniform<shape = [4]>()  y = Add(x, r) }",
    ),
    "normalised over the batch by default": (
        "MeanVarianceNormalization",
        "g (float[N, 3, 4, 4] x) => (float[N, 3, 4, 4] y) { y = MeanVarianceNormalization(x) }",
    ),
    "channels that are rows": (
        "InstanceNormalization",
        """g (float[N, 3, 4] x, float[3] one) => (float[N, 3, 4] y) {
        t = Transpose<perm = [1, 0, 2]>(x)  a = InstanceNormalization(t, one, one)  y = Transpose<perm = [1, 0, 2]>(a) }""",
    ),
    "a vector as one example": (
        "Scaler",
        "g (float[N] x) => (float[N] y) { y = ai.onnx.ml.Scaler<offset = [1.0], scale = [2.0]>(x) }",
    ),
    "words that are dropped": (
        "StringNormalizer",
        'g (string[N] x) => (string[N] y) { y = StringNormalizer<stopwords = ["a"]>(x) }',
    ),
    "regions of images": (
        "RoiAlign",
        "g (float[N, 3, 8, 8] x, float[N, 4] x_rois, int64[N] x_image) => (float[N, 3, 1, 1] y) { y = RoiAlign(x, x_rois, x_image) }",
    ),
    "boxes that suppress each other": (
        "NonMaxSuppression",
        "g (float[N, 5, 4] x, float[N, 1, 5] x_scores) => (int64[M, 3] y) { y = NonMaxSuppression(x, x_scores) }",
    ),
    "attention to keys that all share their batch": (
        "com.microsoft.MultiHeadAttention",
        "g (float[N, 3, 8] x, float[3, 3, 8] k) => (float[N, 3, 8] y) { y = com.microsoft.MultiHeadAttention<num_heads = 2>(x, k, k) }",
    ),
    "weights that are rows": (
        "Conv",
        "g (float[N, 3, 4, 4] x) => (float[N, N, 1, 1] y) { y = Conv(x, x) }",
    ),
    "an average of the batch below the first bit": (
        "ReduceMean",
        """g (float[N, 4] x) => (float[N, 4] y) <float e = {0.000000000001}> { m = ReduceMean(x)  t = Mul(m, e)  y = Add(x, t) }""",
    ),
    "a NaN for all": (
        "ReduceSum",
        "g (float[N, 4] x) => (float[N, 4] y) <float z = {0}> { m = ReduceSum(x)  t = Mul(m, z)  y = Add(x, t) }",
    ),
}


@pytest.mark.parametrize("name", COUPLED)
def test_dependent_rows_end_the_proof(name: str):
    ends_with(*COUPLED[name])
