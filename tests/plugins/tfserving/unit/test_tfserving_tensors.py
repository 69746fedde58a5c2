"""Tensors and examples of TensorFlow Serving's gRPC services."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.inputs import InputPlan
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.plugins.compat.tfserving.grpc.examples import read_input, write_classes, write_values
from millstream.plugins.compat.tfserving.grpc.schema import message
from millstream.plugins.compat.tfserving.grpc.tensors import read_tensor, write_tensor
from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import BYTES, NUMPY, encode_elements
from millstream.services.model.signature import Signature, TensorSpec

TensorProto = message("tensorflow.TensorProto")
BYTES_MAX = 1 << 20


def spec(name: str, datatype: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, datatype=datatype, shape=shape)


def plan_of(datatype: str, *shape: int) -> InputPlan:
    return InputPlan("m", 0, spec("x", datatype, *shape), batching=True, rows_max=100)


def tensor(dtype: int, *shape: int, **fields: Any) -> Any:
    made = TensorProto(dtype=dtype, **fields)
    made.tensor_shape.SetInParent()
    for size in shape:
        made.tensor_shape.dim.add(size=size)
    return made


def read(plan: InputPlan, sent: Any) -> bytes:
    return bytes(read_tensor(plan, TensorProto.FromString(sent.SerializeToString()), BYTES_MAX).tensor.data)


@pytest.mark.parametrize("datatype", sorted(NUMPY))
@given(data=st.data())
def test_what_is_written_is_read_whatever_the_datatype(datatype, data):
    array = data.draw(arrays.arrays(NUMPY[datatype], (2, 3)))
    written = TensorProto()
    write_tensor(OutputTensor(datatype, (2, 3), array), written)
    assert [dim.size for dim in written.tensor_shape.dim] == [2, 3]
    assert not written.tensor_content  # some clients read the fields alone
    assert read(plan_of(datatype, -1, 3), written) == array.tobytes()
    as_bytes = tensor(written.dtype, 2, 3, tensor_content=array.tobytes())
    assert read(plan_of(datatype, -1, 3), as_bytes) == array.tobytes()


@given(st.lists(st.binary(max_size=40), min_size=1, max_size=5))
def test_strings_are_written_and_read(strings):
    written = TensorProto()
    write_tensor(OutputTensor(BYTES, (len(strings),), strings), written)
    assert read(plan_of(BYTES, -1), written) == encode_elements(strings)


def test_a_view_of_a_larger_output_is_written():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)[:, 1:3]
    written = TensorProto()
    write_tensor(OutputTensor("FP32", (3, 2), array), written)
    assert list(written.float_val) == [1, 2, 5, 6, 9, 10]


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ([7.0], [7, 7, 7, 7]),
        ([1.0, 2.0], [1, 2, 2, 2]),
        ([], [0, 0, 0, 0]),
    ],
)
def test_missing_elements_are_the_last_one_again(sent, expected):
    made = tensor(1, 2, 2, float_val=sent)
    assert read(plan_of("FP32", -1, 2), made) == np.array(expected, np.float32).tobytes()


def test_missing_strings_are_the_last_one_again():
    assert read(plan_of(BYTES, -1), tensor(7, 3, string_val=[b"a", b"b"])) == encode_elements([b"a", b"b", b"b"])


@pytest.mark.parametrize(
    ("datatype", "sent", "says"),
    [
        ("FP32", tensor(1, 1, 2, float_val=[1, 2, 3]), "3 elements in 'float_val' for a tensor_shape with 2"),
        ("FP32", tensor(1, 1, 2, tensor_content=bytes(7)), "byte size mismatch"),
        ("FP32", tensor(1, 2, float_val=[1, 2]), "unexpected shape"),
        ("FP32", tensor(1, -1, 2), "unsigned-integer"),
        ("FP32", tensor(2, 1, 2), "data-type is 'FP64', but model 'm' expects 'FP32'"),
        ("FP32", tensor(8, 1, 2), "dtype 8 is not supported"),
        ("FP32", tensor(0, 1, 2), "dtype 0 is not supported"),
        ("INT8", tensor(6, 1, 2, int_val=[1, 128]), "out of the range of INT8"),
        ("UINT8", tensor(4, 1, 2, int_val=[1, -1]), "out of the range of UINT8"),
        ("FP16", tensor(19, 1, 2, half_val=[1, 1 << 16]), "out of the range of FP16"),
        (BYTES, tensor(7, 1, 2, tensor_content=b"abc"), "not in 'tensor_content'"),
    ],
)
def test_what_is_wrong_is_invalid(datatype, sent, says):
    with pytest.raises(Failure, match=says) as caught:
        read(plan_of(datatype, -1, 2), sent)
    assert caught.value.code is Code.INVALID


def test_an_unknown_rank_is_invalid():
    made = tensor(1, float_val=[1])
    made.tensor_shape.unknown_rank = True
    with pytest.raises(Failure, match="unknown rank"):
        read(plan_of("FP32", -1, 2), made)


@pytest.mark.parametrize(
    ("datatype", "sent"),
    [("FP32", tensor(1, 1, 1 << 40, float_val=[1])), (BYTES, tensor(7, 1, 1 << 40, string_val=[b"a"]))],
)
def test_a_few_bytes_do_not_become_a_large_tensor(datatype, sent):
    with pytest.raises(Failure) as caught:
        read(plan_of(datatype, -1, -1), sent)
    assert caught.value.code is Code.TOO_LARGE


def test_any_byte_but_zero_is_true():
    assert read(plan_of("BOOL", -1, 2), tensor(10, 1, 2, tensor_content=b"\x00\x07")) == b"\x00\x01"


def plans(*specs: TensorSpec) -> InputPlans:
    return InputPlans("m", Signature(inputs=specs, outputs=(spec("y", "FP32", -1, 1),), batching=True), rows_max=100)


FEATURES = plans(spec("number", "FP32", -1, 1), spec("ids", "INT64", -1, 2), spec("word", BYTES, -1))


def example(number: float | None = None, ids: tuple[int, ...] = (), word: bytes | None = None) -> Any:
    made = message("tensorflow.Example")()
    features = made.features.feature
    if number is not None:
        features["number"].float_list.value.append(number)
    if ids:
        features["ids"].int64_list.value.extend(ids)
    if word is not None:
        features["word"].bytes_list.value.append(word)
    return made


def check_inputs(sent: Any) -> None:
    inputs = read_input(FEATURES, sent)
    assert inputs.rows == 2
    number, ids, word = inputs.tensors
    assert bytes(number.data) == np.array([[1.5], [2.5]], np.float32).tobytes()
    assert bytes(ids.data) == np.array([[1, 2], [3, 4]], np.int64).tobytes()
    assert bytes(word.data) == encode_elements([b"\xffa", b"\xffa"])


def test_examples_are_rows():
    sent = message("tensorflow.serving.Input")()
    sent.example_list.examples.extend([example(1.5, (1, 2), b"\xffa"), example(2.5, (3, 4), b"\xffa")])
    check_inputs(sent)


def test_the_context_is_in_every_example():
    sent = message("tensorflow.serving.Input")()
    sent.example_list_with_context.examples.extend([example(1.5, (1, 2)), example(2.5, (3, 4))])
    sent.example_list_with_context.context.CopyFrom(example(word=b"\xffa"))
    check_inputs(sent)


@pytest.mark.parametrize("kind", ["", "example_list", "example_list_with_context"])
def test_an_input_without_examples_is_invalid(kind):
    sent = message("tensorflow.serving.Input")()
    if kind:
        getattr(sent, kind).SetInParent()
    with pytest.raises(Failure, match="Input is empty"):
        read_input(FEATURES, sent)


def test_examples_that_differ_in_features_are_invalid():
    sent = message("tensorflow.serving.Input")()
    sent.example_list.examples.extend([example(1.5, (1, 2), b"a"), example(1.5, (1, 2))])
    with pytest.raises(Failure, match="names other inputs"):
        read_input(FEATURES, sent)


def test_classes_have_labels_or_numbers():
    result = message("tensorflow.serving.ClassificationResult")()
    write_classes([OutputTensor("FP32", (1, 3), np.array([[0.5, 1, 2]], np.float32))], ["cat", "dog"], result)
    [found] = result.classifications
    assert [(one.label, one.score) for one in found.classes] == [("cat", 0.5), ("dog", 1), ("2", 2)]


def test_values_are_regressions():
    result = message("tensorflow.serving.RegressionResult")()
    write_values([OutputTensor("FP32", (2, 1), np.array([[0.5], [2]], np.float32))], result)
    assert [one.value for one in result.regressions] == [0.5, 2]


@pytest.mark.parametrize("write", [lambda outputs, result: write_classes(outputs, [], result), write_values])
def test_outputs_of_another_form_are_invalid(write):
    outputs = [OutputTensor("FP32", (1, 2, 2), np.zeros((1, 2, 2), np.float32))]
    with pytest.raises(Failure, match="the model cannot"):
        write(outputs, message("tensorflow.serving.ClassificationResult")())
