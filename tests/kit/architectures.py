"""Small models of real architectures, written as their exporters write them (opset 17, ONNX's text form).

Inputs whose names begin with "x" have rows on axis 0; all others are weights, filled with seeded numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

_HEAD = '<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>\n'

#: one size of a shape, as torch.onnx traces x.size(i): Shape, Gather, Unsqueeze
_SIZE = """
    {name}_shape = Shape(x)  {name}_index = Constant<value_int = {axis}>()  {name}_axes = Constant<value_ints = [0]>()
    {name}_scalar = Gather({name}_shape, {name}_index)  {name} = Unsqueeze({name}_scalar, {name}_axes)"""


def _size(name: str, axis: int) -> str:
    return _SIZE.format(name=name, axis=axis)


_HEADS = f"""{_size("n", 0)}{_size("l", 1)}
    heads = Constant<value_ints = [2]>()  width = Constant<value_ints = [4]>()  whole = Constant<value_ints = [8]>()
    split = Concat<axis = 0>(n, l, heads, width)  merged = Concat<axis = 0>(n, l, whole)"""

_ATTENTION = """
    q0 = MatMul(h, wq)  q1 = Add(q0, b8)  q2 = Reshape(q1, split)  q = Transpose<perm = [0, 2, 1, 3]>(q2)
    k0 = MatMul(h, wk)  k1 = Add(k0, b8)  k2 = Reshape(k1, split)  k = Transpose<perm = [0, 2, 3, 1]>(k2)
    v0 = MatMul(h, wv)  v1 = Add(v0, b8)  v2 = Reshape(v1, split)  v = Transpose<perm = [0, 2, 1, 3]>(v2)
    s0 = MatMul(q, k)  d0 = Shape<start = 3>(q)  d1 = Cast<to = 1>(d0)  d = Sqrt(d1)  s1 = Div(s0, d)
    s2 = {masked}  p = Softmax<axis = -1>(s2)  c0 = MatMul(p, v)  c1 = Transpose<perm = [0, 2, 1, 3]>(c0)
    c2 = Reshape(c1, merged)  c3 = MatMul(c2, wo)  r1 = Add(c3, h)
    two = Constant<value_float = 2.0>()  tiny = Constant<value_float = 0.00001>()
    mean = ReduceMean<axes = [-1]>(r1)  centred = Sub(r1, mean)  square = Pow(centred, two)
    variance = ReduceMean<axes = [-1]>(square)  v_eps = Add(variance, tiny)  deviation = Sqrt(v_eps)
    n1 = Div(centred, deviation)  n2 = Mul(n1, b8)  n3 = Add(n2, b8)
    f0 = MatMul(n3, wf)  root = Constant<value_float = 1.4142135>()  f1 = Div(f0, root)  f2 = Erf(f1)
    one = Constant<value_float = 1.0>()  f3 = Add(f2, one)  f4 = Mul(f0, f3)  f5 = MatMul(f4, wg)  out = Add(f5, n3)"""

_WEIGHTS = (
    "float[8, 8] wq, float[8, 8] wk, float[8, 8] wv, float[8, 8] wo, float[8, 16] wf, float[16, 8] wg, float[8] b8"
)

GRAPHS = {
    # BERT: an attention mask of 0 and 1, the first token pooled
    "bert": f"""g (int64[N, L] x, int64[N, L] x_mask, float[32, 8] words, float[1, 16, 8] places, {_WEIGHTS}) => (float[N, L, 8] out, float[N, 8] pooled) {{
    {_HEADS}
    e0 = Gather(words, x)  zero1 = Constant<value_ints = [0]>()  one1 = Constant<value_ints = [1]>()
    e1 = Slice(places, zero1, l, one1)  h = Add(e0, e1)
    m_axes = Constant<value_ints = [1, 2]>()  m0 = Unsqueeze(x_mask, m_axes)  m1 = Cast<to = 1>(m0)
    ones = Constant<value_float = 1.0>()  least = Constant<value_float = -10000.0>()  m2 = Sub(ones, m1)  mask = Mul(m2, least)
    {_ATTENTION.format(masked="Add(s1, mask)")}
    first = Constant<value_int = 0>()  t0 = Gather<axis = 1>(out, first)  t1 = Gemm<transB = 1>(t0, wo, b8)  pooled = Tanh(t1) }}""",
    # a sentence embedder: mean over the unmasked tokens, normalised to length 1
    "sentence embedding": """g (int64[N, L] x, int64[N, L] x_mask, float[32, 8] words) => (float[N, 8] y) {
    h = Gather(words, x)  last = Constant<value_ints = [-1]>()  m0 = Unsqueeze(x_mask, last)
    shape = Shape(h)  minus = Constant<value_ints = [-1, -1, -1]>()  same = Equal(shape, minus)
    ones = Constant<value_ints = [1, 1, 1]>()  target = Where(same, ones, shape)
    m1 = Expand(m0, target)  m = Cast<to = 1>(m1)  w = Mul(h, m)  axes = Constant<value_ints = [1]>()
    total = ReduceSum<keepdims = 0>(w, axes)  count = ReduceSum<keepdims = 0>(m, axes)
    tiny = Constant<value_float = 0.000000001>()  c = Clip(count, tiny)  mean = Div(total, c)
    norm = ReduceL2<axes = [1], keepdims = 1>(mean)  n0 = Clip(norm, tiny)  s = Shape(mean)  n1 = Expand(n0, s)  y = Div(mean, n1) }""",
    # GPT: a causal mask cut from a stored triangle, query, key and value in one product
    "gpt": f"""g (float[N, L, 8] x, float[1, 1, 16, 16] triangle, float[8, 24] wqkv, {_WEIGHTS}) => (float[N, L, 8] out) {{
    {_HEADS} h = Identity(x)
    qkv = MatMul(x, wqkv)  gq, gk, gv = Split<axis = 2>(qkv)  g0 = Add(gq, gk)  g1 = Add(g0, gv)
    zero1 = Constant<value_ints = [0]>()  rows2 = Constant<value_ints = [2]>()  columns3 = Constant<value_ints = [3]>()
    t0 = Slice(triangle, zero1, l, rows2)  t1 = Slice(t0, zero1, l, columns3)  keep = Cast<to = 9>(t1)
    least = Constant<value_float = -10000.0>()
    {_ATTENTION.format(masked="Where(keep, s1, least)").replace("MatMul(h, wq)", "MatMul(g1, wq)")} }}""",
    # a causal mask that is computed from positions
    "decoder with computed positions": f"""g (float[N, L, 8] x, {_WEIGHTS}) => (float[N, L, 8] out) {{
    {_HEADS} h = Identity(x)
    zero = Constant<value_int = 0>()  step = Constant<value_int = 1>()  places = Range(zero, l_scalar, step)
    column = Constant<value_ints = [1]>()  down = Unsqueeze(places, column)  keep = GreaterOrEqual(down, places)
    least = Constant<value_float = -10000.0>()
    {_ATTENTION.format(masked="Where(keep, s1, least)")} }}""",
    # a vision transformer: patches, a class token repeated for each row
    "vit": f"""g (float[N, 3, 8, 8] x, float[8, 3, 4, 4] kernel, float[1, 1, 8] token, float[1, 5, 8] places, {_WEIGHTS}) => (float[N, 8] y) {{
    {_size("n", 0)}
    a = Conv<kernel_shape = [4, 4], strides = [4, 4]>(x, kernel)  eight = Constant<value_ints = [8]>()  rest = Constant<value_ints = [-1]>()
    flat = Concat<axis = 0>(n, eight, rest)  b = Reshape(a, flat)  c = Transpose<perm = [0, 2, 1]>(b)
    minus = Constant<value_ints = [-1]>()  t_shape = Concat<axis = 0>(n, minus, minus)  less = Constant<value_ints = [-1, -1, -1]>()
    is_minus = Equal(t_shape, less)  ones = Constant<value_ints = [1, 1, 1]>()  t_target = Where(is_minus, ones, t_shape)
    tokens = Expand(token, t_target)  with_token = Concat<axis = 1>(tokens, c)  h = Add(with_token, places)
    l = Constant<value_ints = [5]>()  heads = Constant<value_ints = [2]>()  width = Constant<value_ints = [4]>()
    split = Concat<axis = 0>(n, l, heads, width)  merged = Concat<axis = 0>(n, l, eight)
    {_ATTENTION.format(masked="Identity(s1)")}
    first = Constant<value_int = 0>()  y = Gather<axis = 1>(out, first) }}""",
    # windows of a Swin transformer: folded into the batch, shifted, unfolded
    "swin": """g (float[N, 8, 8, 4] x, float[4, 4] w) => (float[N, 8, 8, 4] y) {
    zero = Constant<value_ints = [0]>()  two = Constant<value_ints = [2]>()  end = Constant<value_ints = [9223372036854775807]>()  one = Constant<value_ints = [1]>()
    s0 = Slice(x, two, end, one)  s1 = Slice(x, zero, two, one)  shifted = Concat<axis = 1>(s0, s1)
    n = Shape<end = 1>(x)  inner = Constant<value_ints = [2, 4, 2, 4, 4]>()  parts = Concat<axis = 0>(n, inner)
    a = Reshape(shifted, parts)  b = Transpose<perm = [0, 1, 3, 2, 4, 5]>(a)  windows = Constant<value_ints = [-1, 16, 4]>()
    c = Reshape(b, windows)  q = MatMul(c, w)  kt = Transpose<perm = [0, 2, 1]>(c)  s = MatMul(q, kt)  p = Softmax(s)  o = MatMul(p, c)
    back = Constant<value_ints = [-1, 2, 2, 4, 4, 4]>()  d = Reshape(o, back)  e = Transpose<perm = [0, 1, 3, 2, 4, 5]>(d)
    whole = Constant<value_ints = [-1, 8, 8, 4]>()  f = Reshape(e, whole)  y = Add(f, x) }""",
    # the text half of CLIP: each row's state at its own last token
    "clip text": """g (int64[N, L] x, float[32, 8] words) => (float[N, 8] y) {
    h = Gather(words, x)  place = ArgMax<axis = -1, keepdims = 0>(x)
    shape = Shape(h)  zero = Constant<value_int = 0>()  n = Gather(shape, zero)  one = Constant<value_int = 1>()
    rows = Range(zero, n, one)  last = Constant<value_ints = [-1]>()
    r1 = Unsqueeze(rows, last)  p1 = Unsqueeze(place, last)  both = Concat<axis = -1>(r1, p1)  y = GatherND(h, both) }""",
    # torch.nn.LSTM with batch_first, zero states made for the batch
    "lstm": f"""g (float[N, L, 3] x, float[2, 16, 3] w, float[2, 16, 4] r, float[2, 32] b) => (float[N, L, 8] y, float[N, 8] last) {{
    {_size("n", 0)}
    t = Transpose<perm = [1, 0, 2]>(x)  two = Constant<value_ints = [2]>()  four = Constant<value_ints = [4]>()
    s = Concat<axis = 0>(two, n, four)  zeros = ConstantOfShape(s)
    o, h, c = LSTM<hidden_size = 4, direction = "bidirectional">(t, w, r, b, , zeros, zeros)
    o1 = Transpose<perm = [0, 2, 1, 3]>(o)  merge = Constant<value_ints = [0, 0, -1]>()  o2 = Reshape(o1, merge)  y = Transpose<perm = [1, 0, 2]>(o2)
    h1 = Transpose<perm = [1, 0, 2]>(h)  flat = Constant<value_ints = [-1, 8]>()  last = Reshape(h1, flat) }}""",
    # a GRU with the length of each row
    "gru": """g (float[N, 5, 3] x, int32[N] x_lengths, float[1, 12, 3] w, float[1, 12, 4] r, float[1, 24] b) => (float[N, 5, 4] y) {
    t = Transpose<perm = [1, 0, 2]>(x)  o, h = GRU<hidden_size = 4, linear_before_reset = 1>(t, w, r, b, x_lengths)
    axes = Constant<value_ints = [1]>()  o1 = Squeeze(o, axes)  y = Transpose<perm = [1, 0, 2]>(o1) }""",
    # U-Net: downsample, upsample to the earlier size, concatenate
    "unet": """g (float[N, 2, 8, 8] x, float[4, 2, 3, 3] k1, float[4, 4, 3, 3] k2, float[2, 6, 1, 1] k3) => (float[N, 2, 8, 8] y) {
    a = Conv<pads = [1, 1, 1, 1]>(x, k1)  a1 = Relu(a)  p = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(a1)
    c = Conv<pads = [1, 1, 1, 1]>(p, k2)  shape = Shape(c)  zero = Constant<value_ints = [0]>()  two = Constant<value_ints = [2]>()  axis = Constant<value_ints = [0]>()
    kept = Slice(shape, zero, two, axis)  target = Shape<start = 2>(x)  sizes = Concat<axis = 0>(kept, target)
    up = Resize<mode = "linear", coordinate_transformation_mode = "pytorch_half_pixel">(c, , , sizes)
    both = Concat<axis = 1>(x, up)  y = Conv(both, k3) }""",
    # squeeze and excitation with channel shuffle
    "mobile": """g (float[N, 4, 6, 6] x, float[4, 2, 1, 1] k, float[4, 4, 1, 1] k2) => (float[N, 4] y) {
    a = Conv<group = 2>(x, k)  five = Constant<value_ints = [-1, 2, 2, 6, 6]>()  b = Reshape(a, five)  c = Transpose<perm = [0, 2, 1, 3, 4]>(b)
    four = Constant<value_ints = [-1, 4, 6, 6]>()  d = Reshape(c, four)  e = GlobalAveragePool(d)  f = Conv(e, k2)  g1 = HardSigmoid(f)
    h = Mul(d, g1)  y = ReduceMean<axes = [2, 3], keepdims = 0>(h) }""",
    # heads of a one-shot detector: boxes of two scales side by side, no suppression
    "detector heads": f"""g (float[N, 3, 8, 8] x, float[8, 3, 3, 3] k1, float[8, 3, 5, 5] k2) => (float[N, B, 4] y) {{
    {_size("n", 0)}
    a = Conv(x, k1)  a1 = Transpose<perm = [0, 2, 3, 1]>(a)  minus = Constant<value_ints = [-1]>()  four = Constant<value_ints = [4]>()
    t = Concat<axis = 0>(n, minus, four)  a2 = Reshape(a1, t)  b = Conv(x, k2)  b1 = Transpose<perm = [0, 2, 3, 1]>(b)  b2 = Reshape(b1, t)
    both = Concat<axis = 1>(a2, b2)  y = Sigmoid(both) }}""",
    # statically quantised, as quantize_static writes it
    "int8 QDQ": """g (float[N, 2, 6, 6] x, int8[4, 2, 3, 3] wi, int8[64, 3] mi) => (float[N, 3] y) <float s = {0.02}, uint8 z = {128}, int8 zero = {0}> {
    q = QuantizeLinear(x, s, z)  a = DequantizeLinear(q, s, z)  w = DequantizeLinear(wi, s, zero)  c = Conv(a, w)  r = Relu(c)
    q2 = QuantizeLinear(r, s, z)  b = DequantizeLinear(q2, s, z)  f = Flatten(b)  m = DequantizeLinear(mi, s, zero)  y = MatMul(f, m) }""",
    # as ONNX Runtime's transformer optimiser writes a layer
    "fused encoder": """g (float[N, L, 8] x, float[8, 24] w, float[24] b, float[8, 8] wo, float[8] one) => (float[N, L, 8] y) {
    a = com.microsoft.Attention<num_heads = 2>(x, w, b)  c = MatMul(a, wo)
    d = com.microsoft.SkipLayerNormalization(c, x, one, one)  y = com.microsoft.FastGelu(d, one) }""",
    # a hand-written recurrence over time
    "scan over time": """g (float[N, L, 4] x, float[4, 4] w) => (float[N, L, 4] y) {
    n = Shape<end = 1>(x)  four = Constant<value_ints = [4]>()  s = Concat<axis = 0>(n, four)  first = ConstantOfShape(s)
    last, y = Scan<num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1], body = b (float[N, 4] h, float[N, 4] e) => (float[N, 4] i, float[N, 4] o) {
        u = MatMul(h, w)  v = Add(u, e)  i = Tanh(v)  o = Identity(i) }>(first, x) }""",
    # a decoder that unrolls itself
    "loop of five steps": """g (float[N, 4] x, float[4, 4] w) => (float[N, 5, 4] y) <int64 five = {5}> {
    last, all = Loop<body = b (int64 i, bool c, float[N, 4] h) => (bool d, float[N, 4] u, float[N, 4] o) {
        d = Identity(c)  v = MatMul(h, w)  u = Tanh(v)  o = Identity(u) }>(five, , x)
    y = Transpose<perm = [1, 0, 2]>(all) }""",
    # group normalisation by way of instance normalisation, as torch.onnx writes it
    "group normalisation": """g (float[N, 4, 5, 5] x, float[4, 1, 1] scale) => (float[N, 4, 5, 5] y) <float[2] ones = {1, 1}, float[2] zeros = {0, 0}> {
    groups = Constant<value_ints = [0, 2, -1]>()  a = Reshape(x, groups)  b = InstanceNormalization(a, ones, zeros)
    shape = Shape(x)  c = Reshape(b, shape)  y = Mul(c, scale) }""",
    # classifier-free guidance: both halves in one batch
    "two halves": """g (float[N, 4] x, float[4, 4] w) => (float[N, 4] y) {
    both = Concat<axis = 0>(x, x)  a = MatMul(both, w)  n = Shape(x)  two = Constant<value_ints = [2]>()  t = Concat<axis = 0>(two, n)
    b = Reshape(a, t)  zero = Constant<value_int = 0>()  one = Constant<value_int = 1>()
    u = Gather(b, zero)  c = Gather(b, one)  d = Sub(c, u)  y = Add(u, d) }""",
}


def build(name: str) -> onnx.ModelProto:
    """Return the model with this name in GRAPHS, including its weights."""
    model = onnx.parser.parse_model(_HEAD + GRAPHS[name])
    rng = np.random.default_rng(7)
    weights = [value for value in model.graph.input if not value.name.startswith("x")]
    model.graph.initializer.extend(numpy_helper.from_array(_weight(value, rng), value.name) for value in weights)
    kept = [value for value in model.graph.input if value.name.startswith("x")]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    onnx.checker.check_model(model)
    return model


def _weight(value: onnx.ValueInfoProto, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
    if value.name == "triangle":
        return np.tril(np.ones(shape, np.float32))
    dtype = helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
    if value.type.tensor_type.elem_type == TensorProto.INT8:
        return rng.integers(-100, 100, shape).astype(dtype)
    return (rng.standard_normal(shape) * 0.4).astype(dtype)


def rows(model: onnx.ModelProto, count: int, length: int = 6, seed: int = 0) -> dict[str, np.ndarray[Any, Any]]:
    """Return random inputs of `count` rows; other variable sizes are `length`. Integers are valid for every table above."""
    rng = np.random.default_rng(seed)
    feeds = {}
    for value in model.graph.input:
        declared = value.type.tensor_type
        shape = [count, *(dim.dim_value or length for dim in declared.shape.dim[1:])]
        if declared.elem_type == TensorProto.FLOAT:
            feeds[value.name] = rng.uniform(-2, 2, shape).astype(np.float32)
        else:
            high = 2 if "mask" in value.name else 5
            feeds[value.name] = rng.integers(0 if high == 2 else 1, high, shape).astype(
                helper.tensor_dtype_to_np_dtype(declared.elem_type)
            )
    return feeds
