"""Responses are written by hand: protobuf reads them as what they should be. And what else is bytes here."""

from __future__ import annotations

import asyncio
import gzip
import zlib
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.grpc.codec import messages
from millstream.gateway.grpc.codec.encode import FINAL, GrpcEncoder, stream_response, varint
from millstream.gateway.tensors.output_options import Extensions, OutputOption
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.services.errors import GRPC_STATUS, Code, Failure
from millstream.services.model.signature import Signature, TensorSpec

SIGNATURE = Signature(
    inputs=(),
    outputs=(
        TensorSpec(name="y", datatype="FP32", shape=(-1, -1)),
        TensorSpec(name="t", datatype="BYTES", shape=(-1,)),
        TensorSpec(name="h", datatype="BF16", shape=(-1,)),
    ),
    batching=True,
)


def reply(columns: int) -> list[OutputTensor]:
    numbers = np.arange(2 * columns, dtype=np.float32).reshape(2, columns)
    return [
        OutputTensor("FP32", (2, columns), numbers),
        OutputTensor("BYTES", (2,), [b"\xff", b""]),
        OutputTensor("BF16", (2,), np.array([1, 2], np.uint16)),
    ]


def expected(columns: int, wanted: tuple[int, ...], **fields: Any) -> Any:
    tensors = reply(columns)
    raws = [tensors[0].array.tobytes(), b"\1\0\0\0\xff\0\0\0\0", b"\1\0\2\0"]  # type: ignore[union-attr]
    message = pb.ModelInferResponse(model_name="m", model_version="7", **fields)
    for index in wanted:
        spec = SIGNATURE.outputs[index]
        message.outputs.add(name=spec.name, datatype=spec.datatype, shape=tensors[index].shape)
        message.raw_output_contents.append(raws[index])
    return message


@pytest.mark.parametrize("columns", [0, 1, 16, 40_000])
@pytest.mark.parametrize("asked", [None, (2, 0), (1,)])
def test_written_by_hand_is_what_protobuf_reads(columns, asked):
    encoder = GrpcEncoder("m", 7, SIGNATURE, Extensions(SIGNATURE, {}, None, 0))
    wanted = (0, 1, 2) if asked is None else asked
    for _ in range(2):  # the head is made, then remembered
        assert pb.ModelInferResponse.FromString(encoder.encode(asked, "", reply(columns))) == expected(columns, wanted)
        written = encoder.encode(asked, "é" * 100, reply(columns))
        assert pb.ModelInferResponse.FromString(written) == expected(columns, wanted, id="é" * 100)


class Region:
    """A part of a client's memory."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes | memoryview, output: str) -> None:
        self.data = output.encode() + bytes(data)


def test_classes_and_shared_memory_in_place_of_tensors():
    encoder = GrpcEncoder("m", 7, SIGNATURE, Extensions(SIGNATURE, {}, None, 0))
    plain = pb.ModelInferResponse.FromString(encoder.encode((0, 2), "", reply(3)))
    region = Region()
    output_options = {0: OutputOption(target=region), 2: OutputOption(classes=1)}
    for _ in range(2):
        written = pb.ModelInferResponse.FromString(encoder.encode((0, 2), "", reply(3), output_options=output_options))
        assert region.data == SIGNATURE.outputs[0].name.encode() + plain.raw_output_contents[0]
        assert written.outputs[0] == plain.outputs[0]
        assert written.raw_output_contents[0] == b""
        assert (written.outputs[1].datatype, list(written.outputs[1].shape)) == ("BYTES", [2, 1])
        assert written.raw_output_contents[1].count(b":0") == 2
        assert pb.ModelInferResponse.FromString(encoder.encode((0, 2), "", reply(3))) == plain


def test_a_response_in_a_stream():
    written = stream_response(
        GrpcEncoder("m", 7, SIGNATURE, Extensions(SIGNATURE, {}, None, 0)).encode((0,), "i", reply(100), FINAL)
    )
    wanted = expected(100, (0,), id="i")
    wanted.parameters["triton_final_response"].bool_param = True
    assert pb.ModelStreamInferResponse.FromString(written) == pb.ModelStreamInferResponse(infer_response=wanted)


def test_lengths():
    for number in (0, 1, 127, 128, 300, 2**31):
        assert pb.ModelConfigRequest.FromString(b"\x78" + varint(number)) is not None
    assert varint(300) == b"\xac\x02"


def test_compressed_messages_are_opened_up_to_the_limit():
    body = pb.ModelReadyRequest(name="m" * 1000).SerializeToString()
    for packed in (gzip.compress(body), zlib.compress(body)):
        assert packed[0] in messages.PACKED
        assert asyncio.run(messages.unpack(packed, 2000)) == body
        with pytest.raises(Failure, match="larger than the limit of 500 bytes") as caught:
            asyncio.run(messages.unpack(packed, 500))
        assert caught.value.code is Code.TOO_LARGE
        with pytest.raises(Failure, match="truncated"):
            asyncio.run(messages.unpack(packed[:-9], 2000))


class Context:
    """The metadata of a call."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self.metadata = metadata

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return self.metadata


def test_an_answer_has_the_form_of_the_question():
    asked = Context(("accept-encoding", "deflate, gzip;q=0.5"))
    assert messages.compression(b"\x0a", Context(), 5000) is None
    assert messages.compression(b"", asked, 5000) is grpc.Compression.Deflate
    assert messages.compression(b"\x1f", Context(), 5000) is grpc.Compression.Gzip
    assert messages.compression(b"\x78", asked, 5000) is grpc.Compression.Deflate
    assert messages.compression(b"\x1f", asked, 100) is None  # hardly smaller
    assert messages.compression(b"\x1f", asked, 1 << 24) is None  # it would hold up the others


def test_every_code_has_its_status():
    for code, name in GRPC_STATUS.items():
        wanted = (("x-request-id", "r-1"), ("retry-after", "1"), ("grpc-retry-pushback-ms", "250"))
        said = messages.refusal(Failure(code, "why \ud800", retry_after_s=0.25), "r-1")
        assert said == (grpc.StatusCode[name], "why \\ud800", wanted)


def test_what_is_no_message_is_refused():
    with pytest.raises(Failure, match=r"the message is not an inference\.ModelInferRequest"):
        messages.parse(pb.ModelInferRequest, b"\xff\xff")
