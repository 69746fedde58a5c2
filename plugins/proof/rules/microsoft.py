"""ONNX Runtime's own operators (domain com.microsoft), which its optimizer and quantizer produce.

Source: ONNX Runtime, docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Hashable

from millstream.plugins.proof.alignment import combine, elementwise
from millstream.plugins.proof.expression import ONE
from millstream.plugins.proof.node import Call, Rule, Rules, always_dependent, dims_of, unknown_dims
from millstream.plugins.proof.rules.convolution import batch, convolution, global_pool, pool
from millstream.plugins.proof.rules.elementwise import unary
from millstream.plugins.proof.rules.matrix import gemm
from millstream.plugins.proof.rules.normalization import check_axis, same
from millstream.plugins.proof.rules.quantization import check_single, linear, linear_binary, linear_unary
from millstream.plugins.proof.rules.sequences import batch_rows, check_batched, check_broadcast, check_shared
from millstream.plugins.proof.value import Dependent, Rows, Value, rowed

_CACHE_INDIRECTION = 9


def biased(call: Call) -> list[Value]:
    """Rule of FastGelu and BiasGelu: an optional bias is added along the last axis."""
    check_shared(call, 1)
    if call.optional(1) is not None:
        check_axis(call.input(0), len(dims_of(call.input(0))) - 1)
    return [elementwise(call.symbols, [value for value in call.inputs if value is not None])]


def fused_convolution(call: Call) -> list[Value]:
    """Rule of FusedConv: Conv with an activation; a fourth operand with the same rows is added."""
    value, rows = batch(call)
    check_shared(call, 1, 2)
    added = call.optional(3)
    if added is not None and added.rows != rows:
        raise Dependent("its fourth operand does not have the rows of its input")
    return convolution(call.with_inputs([value, call.input(1)]))


def fused_matmul(call: Call) -> list[Value]:
    """Rule of FusedMatMul: MatMul whose operands may have their last two axes transposed."""
    if call.flag("transBatchA") or call.flag("transBatchB"):
        raise Dependent("its transposition of batch axes is not supported")
    left, right = call.input(0), call.input(1)
    ranks = len(dims_of(left)), len(dims_of(right))
    if min(ranks) < 2:
        raise Dependent("an operand is not a matrix")
    a: list[Hashable] = [*range(2 - ranks[0], 0), *(["sum", "row"] if call.flag("transA") else ["row", "sum"])]
    b: list[Hashable] = [
        *range(2 - ranks[1], 0),
        *(["column", "sum"] if call.flag("transB") else ["sum", "column"]),
    ]
    return [combine(call.symbols, [(left, a), (right, b)], [*range(2 - max(ranks), 0), "row", "column"])]


def skip_normalization(call: Call) -> list[Value]:
    """Rule of Skip…LayerNormalization: the sum of two tensors, normalized over the last axis.

    Outputs: result, mean, deviation, sum.
    """
    value, rows = call.input(0), call.input(0).rows
    dims = dims_of(value)
    check_axis(value, len(dims) - 1)
    check_shared(call, 2, 3, 4)
    summed = elementwise(call.symbols, [value, call.input(1)])
    if rows is None or summed.rows != rows or len(dims_of(summed)) != len(dims):
        raise Dependent("its second operand does not have the rows of its input")
    moments = rowed([*dims[:-1], ONE], rows)
    return [summed, moments, moments, summed]


def embedding_normalization(call: Call) -> list[Value]:
    """Rule of EmbedLayerNormalization: tokens, segments [batch, length], four tables, mask, positions.

    Outputs: result, length of each mask, sum.
    """
    rows = batch_rows(call)
    check_batched(call, rows, 1, 7)
    check_shared(call, 2, 3, 4, 5, 6)
    positions = call.optional(8)
    if positions is not None and positions.rows != rows and (positions.rows or dims_of(positions)[0] != ONE):
        raise Dependent("its positions do not have the rows of its input")
    result = rowed([*dims_of(call.input(0)), call.symbols.fresh()], rows)
    return [result, rowed([rows.size], rows), result]


def packed_attention(call: Call) -> list[Value]:
    """Rule of Attention: input, weights, bias, mask, past [2, batch, …], attention bias, length: result, present."""
    rows = batch_rows(call)
    check_shared(call, 1, 2, 6)
    check_batched(call, rows, 3)
    past = call.optional(4)
    if past is not None and past.rows != rows.moved(1):
        raise Dependent("its past does not have the rows of its input")
    check_broadcast(call, 5, 4, rows)
    result = rowed([rows.size, *unknown_dims(call, 2)], rows)
    present = [*unknown_dims(call, 1), rows.size, *unknown_dims(call, 3)]
    return [result, rowed(present, rows.moved(1))]


def multi_head_attention(call: Call) -> list[Value]:
    """Rule of MultiHeadAttention: query, key, value, bias, padding mask, attention bias, past key and value."""
    rows = batch_rows(call)
    check_batched(call, rows, 1, 2, 4, 6, 7)
    check_shared(call, 3, 8)
    check_broadcast(call, 5, 4, rows)
    if call.optional(_CACHE_INDIRECTION) is not None:
        raise Dependent("its past is looked up by positions in the whole batch")
    result = rowed([rows.size, *unknown_dims(call, 2)], rows)
    return [result, *(rowed([rows.size, *unknown_dims(call, 3)], rows) for _ in range(3))]


def rotary(call: Call) -> list[Value]:
    """Rule of RotaryEmbedding: input, positions (one offset, or one per row), cosines, sines."""
    rows = batch_rows(call)
    check_shared(call, 2, 3)
    positions = call.input(1)
    if positions.rows is None and dims_of(positions) != (ONE,):
        raise Dependent("its positions do not have the rows of its input")
    if positions.rows is not None:
        check_batched(call, rows, 1)
    return [same(call.input(0))]


def packed_weights(call: Call) -> list[Value]:
    """Rule of MatMulNBits: the last axis is multiplied by packed weights."""
    call.only_rowed(0)
    value = call.input(0)
    dims = dims_of(value)
    check_axis(value, len(dims) - 1)
    rows: Rows | None = value.rows
    if rows is None:
        raise Dependent("its input has no rows")
    return [rowed([*dims[:-1], call.symbols.fresh()], rows)]


def linear_pool(call: Call) -> list[Value]:
    """Rule of QLinear…Pool: pooling of a quantized tensor, channels first or last."""
    check_single(call, 1, 2, 3, 4)
    if call.flag("channels_last"):
        value, rows = batch(call)
        if rows is None:
            raise Dependent("its input has no rows")
        return [rowed([rows.size, *unknown_dims(call, len(dims_of(value)) - 1)], rows)]
    return global_pool(call) if "Global" in call.op else pool(call)


_ALL_ROWS = "its scale is computed over all rows"

RULES: Rules = {
    "Attention": Rule(packed_attention),
    "BiasGelu": Rule(biased),
    "DequantizeLinear": Rule(linear),
    "DynamicQuantizeLSTM": Rule(always_dependent(_ALL_ROWS)),
    "DynamicQuantizeMatMul": Rule(always_dependent(_ALL_ROWS)),
    "EmbedLayerNormalization": Rule(embedding_normalization),
    "FastGelu": Rule(biased),
    "FusedConv": Rule(fused_convolution),
    "FusedGemm": Rule(gemm),
    "FusedMatMul": Rule(fused_matmul),
    "Gelu": Rule(unary),
    "MatMulNBits": Rule(packed_weights),
    "MultiHeadAttention": Rule(multi_head_attention),
    "QLinearAdd": Rule(linear_binary),
    "QLinearAveragePool": Rule(linear_pool),
    "QLinearGlobalAveragePool": Rule(linear_pool),
    "QLinearLeakyRelu": Rule(linear_unary),
    "QLinearMul": Rule(linear_binary),
    "QLinearSigmoid": Rule(linear_unary),
    "QuantizeLinear": Rule(linear),
    "QuickGelu": Rule(unary),
    "Tokenizer": Rule(always_dependent("its output is as wide as the longest text of the batch")),
    "RotaryEmbedding": Rule(rotary),
    "SkipLayerNormalization": Rule(skip_normalization),
    "SkipSimplifiedLayerNormalization": Rule(skip_normalization),
}
