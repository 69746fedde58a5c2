"""A ModelInferRequest as the adapter reads it: every rule of raw and typed contents, and what a refusal says."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.grpc.codec.decode import GrpcCall, GrpcDecoder
from millstream.gateway.scheduling.caller import DEFAULT_OPTIONS, RequestOptions
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.output_options import Extensions, OutputOption
from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import NUMPY
from millstream.services.model.signature import Signature, TensorSpec

RAW = b"\0" * 8


def signature(*inputs: tuple[str, str], outputs: tuple[str, ...] = ("y", "z")) -> Signature:
    return Signature(
        inputs=tuple(TensorSpec(name=name, datatype=datatype, shape=(-1, 2)) for name, datatype in inputs),
        outputs=tuple(TensorSpec(name=name, datatype="FP32", shape=(-1, 2)) for name in outputs),
        batching=True,
    )


class Memory:
    """A region "r" of twenty bytes, whose targets tell their place."""

    def read(self, name: str, offset: int, size_bytes: int) -> bytes:
        assert name == "r"
        return bytes(range(20))[offset : offset + size_bytes]

    def target(self, name: str, offset: int, size_bytes: int) -> Any:
        return name, offset, size_bytes


def decoder(*inputs: tuple[str, str], memory: Memory | None = None) -> GrpcDecoder:
    described = signature(*inputs)
    return GrpcDecoder(InputPlans("m", described, 8), Extensions(described, {}, memory, 1 << 20))


PAIR = decoder(("a", "FP32"), ("b", "FP32"))
ONE = decoder(("a", "FP32"))


def one(datatype: str) -> GrpcDecoder:
    return decoder(("a", datatype))


def request(*raws: bytes, names: tuple[str, ...] = ("a",), datatype: str = "FP32", shape: Any = (1, 2)) -> Any:
    built = pb.ModelInferRequest(model_name="m", raw_input_contents=raws)
    for name in names:
        built.inputs.add(name=name, datatype=datatype, shape=shape)
    return built


def refused(decoder: GrpcDecoder, built: Any, code: Code = Code.INVALID) -> str:
    with pytest.raises(Failure) as caught:
        decoder.decode(built)
    assert caught.value.code is code
    return caught.value.message


def raw(call: GrpcCall) -> list[bytes]:
    return [bytes(tensor.data) for tensor in call.inputs]


def test_raw_contents_are_taken_in_the_order_of_the_inputs():
    call = PAIR.decode(request(b"B" * 8, b"A" * 8, names=("b", "a")))
    assert raw(call) == [b"A" * 8, b"B" * 8]
    assert (call.rows, call.options, call.outputs, call.id) == (1, DEFAULT_OPTIONS, None, "")


def test_raw_and_typed_contents_do_not_mix():
    built = request(RAW, names=("a", "b"))
    built.inputs[1].contents.fp32_contents.extend([1, 2])
    assert refused(PAIR, built) == (
        "contents field must not be specified when using raw_input_contents for 'b' for model 'm'"
    )


def test_an_empty_contents_beside_raw_ones_says_nothing():
    built = request(RAW)
    built.inputs[0].contents.SetInParent()
    assert raw(ONE.decode(built)) == [RAW]


@pytest.mark.parametrize(
    ("built", "message"),
    [
        (request(), "unable to find data for input tensor 'a' for model 'm' in request."),
        (request(RAW, names=("a", "b")), "unable to find data for input tensor 'b' for model 'm' in request."),
        (
            request(RAW, RAW, RAW, names=("a", "b")),
            "expected 2 entries in raw_input_contents but got 3 for model 'm'",
        ),
        (request(RAW[:4]), "input byte size mismatch for input 'a' for model 'm'. Expected 8, got 4"),
        (request(RAW, names=("q",)), "unexpected inference input 'q' for model 'm'"),
        (request(RAW, RAW, names=("a", "a")), "input 'a' already exists in request"),
        (request(RAW), "expected 2 inputs but got 1 inputs for model 'm'. Got input(s) ['a'], but missing required"),
        (request(RAW, datatype="INT32"), "inference input 'a' data-type is 'INT32', but model 'm' expects 'FP32'"),
        (request(RAW, datatype="X"), "invalid datatype for input a"),
        (request(RAW, shape=(2,)), "unexpected shape for input 'a' for model 'm'. Expected [-1,2], got [2]."),
        (request(RAW, shape=(1, -2)), "Unable to parse 'shape'"),
        (request(RAW, shape=(9, 2)), "inference request batch-size must be <= 8 for 'm'"),
        (request(RAW, shape=(2**40, 2**40)), "causes total element count to exceed maximum size"),
    ],
)
def test_refusals(built, message):
    assert message in refused(PAIR, built)


def test_inputs_of_different_rows():
    built = request(RAW, names=("a",))
    built.inputs.add(name="b", datatype="FP32", shape=(2, 2))
    built.raw_input_contents.append(RAW * 2)
    assert refused(PAIR, built) == "input 'b' batch size does not match other inputs for 'm'"


@pytest.mark.parametrize("datatype", sorted(set(NUMPY) - {"FP16", "BF16"}))
def test_typed_contents(datatype):
    array = np.array([[0, 1], [1, 0]]).astype(NUMPY[datatype])
    field = {"BOOL": "bool", "INT64": "int64", "UINT64": "uint64", "FP32": "fp32", "FP64": "fp64"}.get(
        datatype, "uint" if datatype.startswith("U") else "int"
    )
    built = request(datatype=datatype, shape=(2, 2))
    getattr(built.inputs[0].contents, f"{field}_contents").extend(array.ravel().tolist())
    assert raw(one(datatype).decode(built)) == [array.tobytes()]


def test_typed_strings():
    built = request(datatype="BYTES")
    built.inputs[0].contents.bytes_contents.extend([b"\xff\0", b""])
    assert raw(one("BYTES").decode(built)) == [b"\2\0\0\0\xff\0\0\0\0\0"]


@pytest.mark.parametrize(
    ("datatype", "field", "values", "message"),
    [
        ("FP32", "fp32_contents", [1.0], "input byte size mismatch for input 'a' for model 'm'. Expected 8, got 4"),
        ("BYTES", "bytes_contents", [b"x"], "expected 2 strings in 'bytes_contents', got 1 for input 'a'"),
        ("FP32", "fp64_contents", [1.0, 2.0], "FP32 data should be in 'fp32_contents' and nowhere else for input 'a'"),
        ("INT8", "int_contents", [1, 128], "an element is out of the range of INT8 for input 'a'"),
        ("UINT16", "uint_contents", [1, 65536], "an element is out of the range of UINT16 for input 'a'"),
        ("FP16", "fp32_contents", [1, 2], "FP16 data has no typed contents: send it in raw_input_contents"),
        ("BF16", "fp32_contents", [1, 2], "BF16 data has no typed contents: send it in raw_input_contents"),
    ],
)
def test_typed_refusals(datatype, field, values, message):
    built = request(datatype=datatype)
    getattr(built.inputs[0].contents, field).extend(values)
    assert message in refused(one(datatype), built)


def test_one_tensor_in_two_fields():
    built = request()
    built.inputs[0].contents.fp32_contents.extend([1, 2])
    built.inputs[0].contents.int_contents.extend([1, 2])
    assert "nowhere else" in refused(ONE, built)


def test_no_elements_need_no_data():
    assert raw(ONE.decode(request(shape=(0, 2)))) == [b""]
    assert raw(ONE.decode(request(b"", shape=(0, 2)))) == [b""]


def test_a_raw_form_that_not_every_byte_string_is():
    assert refused(one("BYTES"), request(b"\5\0\0\0abc", datatype="BYTES"))


def test_any_byte_but_zero_is_true():
    assert raw(one("BOOL").decode(request(b"\0\2", datatype="BOOL"))) == [b"\0\1"]


def test_terms():
    built = request(RAW)
    built.parameters["timeout"].int64_param = 1_500_000
    built.parameters["priority"].uint64_param = 2
    built.parameters["mine"].double_param = 0.5
    built.parameters["sequence_id"].int64_param = 0
    built.parameters["triton_enable_empty_final_response"].bool_param = True
    assert ONE.decode(built).options == RequestOptions(1.5, 2, parameters={"mine": 0.5})


@pytest.mark.parametrize(
    ("name", "field", "value", "message"),
    [
        ("timeout", "int64_param", -1, "Unable to parse 'timeout'"),
        ("timeout", "bool_param", True, "Unable to parse 'timeout'"),
        ("priority", "string_param", "1", "Unable to parse 'priority'"),
        ("priority", "double_param", 1.0, "Unable to parse 'priority'"),
        ("triton_x", "bool_param", True, "parameter keys starting with 'triton_' are reserved"),
    ],
)
def test_parameters_of_another_type(name, field, value, message):
    built = request(RAW)
    setattr(built.parameters[name], field, value)
    assert message in refused(ONE, built)


def test_a_parameter_without_a_value():
    built = request(RAW)
    built.parameters["mine"].SetInParent()
    assert refused(ONE, built) == "parameter 'mine' must be a string, a number or a boolean"


def test_sequences_are_refused():
    built = request(RAW)
    built.parameters["sequence_id"].string_param = "s"
    assert refused(ONE, built, Code.UNSUPPORTED).startswith("sequences are not supported")


def in_region(item: Any, size_bytes: int, offset: int = 0) -> None:
    item.parameters["shared_memory_region"].string_param = "r"
    item.parameters["shared_memory_byte_size"].int64_param = size_bytes
    item.parameters["shared_memory_offset"].int64_param = offset


def test_inputs_in_shared_memory_have_no_raw_entry():
    pair = decoder(("a", "FP32"), ("b", "FP32"), memory=Memory())
    built = pb.ModelInferRequest(model_name="m", raw_input_contents=[RAW])
    for name in ("a", "b"):
        built.inputs.add(name=name, datatype="FP32", shape=[1, 2])
    in_region(built.inputs[0], 8, 4)
    call = pair.decode(built)
    assert [bytes(tensor.data) for tensor in call.inputs] == [bytes(range(4, 12)), RAW]
    assert call.shared_memory_bytes == 8
    built.raw_input_contents.append(RAW)
    assert "expected 1 entries in raw_input_contents but got 2" in refused(pair, built)
    del built.raw_input_contents[:]
    assert "unable to find data for input tensor 'b'" in refused(pair, built)
    in_region(built.inputs[1], 8)
    assert pair.decode(built).shared_memory_bytes == 16
    built.inputs[1].contents.fp32_contents.append(1)
    assert "unexpected 'contents'" in refused(pair, built)


def test_a_region_is_named_in_full_and_holds_the_tensor():
    known = decoder(("a", "FP32"), memory=Memory())
    built = request(RAW)
    del built.raw_input_contents[:]
    in_region(built.inputs[0], 12)
    assert "input byte size mismatch for input 'a'" in refused(known, built)
    del built.inputs[0].parameters["shared_memory_byte_size"]
    assert "shared_memory_byte_size" in refused(known, built)
    in_region(built.inputs[0], 8, -1)
    assert "shared_memory_offset" in refused(known, built)
    in_region(built.inputs[0], 8)
    assert "not enabled" in refused(ONE, built, Code.UNSUPPORTED)


def test_what_is_asked_of_outputs():
    known = decoder(("a", "FP32"), memory=Memory())
    built = request(RAW)
    in_region(built.outputs.add(name="z"), 5, 6)
    asked = built.outputs.add(name="y")
    asked.parameters["classification"].int64_param = 3
    call = known.decode(built)
    assert call.outputs == (1, 0)
    assert call.output_options is not None
    assert call.output_options[0] == OutputOption(classes=3)
    assert cast("Any", call.output_options[1].target) == ("r", 6, 5)
    assert "not enabled" in refused(ONE, built, Code.UNSUPPORTED)
    asked.parameters["shared_memory_region"].string_param = "r"
    asked.parameters["shared_memory_byte_size"].int64_param = 8
    assert "can't be used with classification" in refused(known, built)


def test_classes_are_a_number():
    built = request(RAW)
    asked = built.outputs.add(name="y")
    asked.parameters["classification"].int64_param = 0
    assert ONE.decode(built).output_options is None
    asked.parameters["classification"].int64_param = -1
    assert "Unable to parse 'classification'" in refused(ONE, built)
    asked.parameters["classification"].string_param = "3"
    assert "Unable to parse 'classification'" in refused(ONE, built)


def test_outputs():
    built = request(RAW)
    built.id = "i"
    built.outputs.add(name="z")
    call = ONE.decode(built)
    assert (call.outputs, call.id) == ((1,), "i")
    built.outputs.add(name="z")
    assert refused(ONE, built) == "output 'z' already exists in request"
    del built.outputs[:]
    built.outputs.add(name="q")
    assert refused(ONE, built) == "unexpected inference output 'q' for model 'm'"
    del built.outputs[:]
    built.id = "i" * 4097
    assert refused(ONE, built) == "the request's 'id' is longer than 4096 characters"
