"""Rows cut into parts and joined again are the rows: any tensors, parts of any size, answered in any order."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millstream.gateway.tensors.inputs import ABSENT, InputTensor
from millstream.gateway.tensors.outputs import OutputTensor, size_of
from millstream.gateway.tensors.row_parts import InputRows, JoinedOutputs
from millstream.services.model.datatypes import BYTES, NUMPY, decode_elements, encode_elements
from millstream.services.model.signature import TensorSpec

DATATYPES = ("FP32", "INT8", "FP16", "INT64", "BOOL", "BF16", BYTES)
Spec = tuple[str, tuple[int, ...]]
SPECS = st.lists(st.tuples(st.sampled_from(DATATYPES), st.lists(st.integers(0, 3), max_size=2).map(tuple)), min_size=1)


def whole_tensor(spec: Spec, rows: int, form: str, rng: np.random.Generator) -> tuple[InputTensor, Any]:
    """Return an input as a decoder may give it, and its values."""
    datatype, inner = spec
    shape, count = (rows, *inner), rows * math.prod(inner)
    if datatype == BYTES:
        elements = [rng.bytes(int(rng.integers(0, 6))) for _ in range(count)]
        raw: Any = encode_elements(elements)
        values: Any = elements
    else:
        values = rng.integers(0, 2, count).astype(NUMPY[datatype]).reshape(shape)
        if form == "array":
            return InputTensor(shape, values, values.nbytes), values
        raw = values.tobytes()
    size = len(raw)
    return InputTensor(shape, {"bytes": raw, "array": raw, "view": memoryview(b"1" + raw)[1:]}[form], size), values


def output_of(datatype: str, tensor: InputTensor) -> OutputTensor:
    """Return what a model that returns its input answers for a part."""
    if datatype == BYTES:
        return OutputTensor(BYTES, tensor.shape, decode_elements(bytes(tensor.data)))
    return OutputTensor(datatype, tensor.shape, np.frombuffer(tensor.data, NUMPY[datatype]).reshape(tensor.shape))


@given(
    specs=SPECS,
    rows=st.integers(1, 40),
    sizes=st.lists(st.integers(1, 9), min_size=1),
    form=st.sampled_from(["bytes", "array", "view"]),
    absent=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_joined_parts_are_the_whole(specs, rows, sizes, form, absent, seed):
    rng = np.random.default_rng(seed)
    made = [whole_tensor(spec, rows, form, rng) for spec in specs]
    names = [TensorSpec(name=f"x{i}", datatype=one[0], shape=(-1, *one[1])) for i, one in enumerate(specs)]
    inputs = [tensor for tensor, _ in made]
    if absent:
        names.append(TensorSpec(name="none", datatype="FP32", shape=(-1,), optional=True))
        inputs.append(ABSENT)
    cut, parts, turn = InputRows(names, inputs, rows), [], 0
    while cut.left:
        taken = min(sizes[turn % len(sizes)], cut.left)
        parts.append((rows - cut.left, cut.take(taken)))
        turn += 1
        assert all(len(tensor.data) == tensor.size_bytes for tensor in parts[-1][1])
        assert not absent or parts[-1][1][-1] is ABSENT
    rng.shuffle(parts)
    joined, size_bytes = JoinedOutputs(rows), 0
    for first_row, tensors in parts:
        reply = [output_of(spec[0], tensor) for spec, tensor in zip(specs, tensors, strict=False)]
        size_bytes += joined.more_bytes(reply)
        assert joined.add(first_row, reply) is None
    assert size_bytes == size_of(joined.reply())
    for output, (_, values) in zip(joined.reply(), made, strict=True):
        assert output.shape[0] == rows
        same = output.array == values if output.datatype == BYTES else np.array_equal(output.array, values)
        assert same


def test_the_inputs_are_not_copied():
    body = bytearray(np.arange(40, dtype=np.float32).tobytes())
    spec = TensorSpec(name="x", datatype="FP32", shape=(-1, 4))
    cut = InputRows([spec], [InputTensor((10, 4), memoryview(body), len(body))], 10)
    (first,), (second,) = cut.take(4), cut.take(6)
    assert all(isinstance(one.data, memoryview) and one.data.obj is body for one in (first, second))


def test_an_output_of_another_shape_is_named():
    joined = JoinedOutputs(4)
    same = OutputTensor("FP32", (2, 1), np.zeros((2, 1), np.float32))
    assert joined.add(0, [same, OutputTensor("FP32", (2, 3), np.zeros((2, 3), np.float32))]) is None
    assert joined.add(2, [same, OutputTensor("FP32", (2, 5), np.zeros((2, 5), np.float32))]) == 1
