"""gRPC reflection, asked by the library's own client, which then calls with nothing but what it was told."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pool, message_factory
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

import millstream.gateway.grpc.methods.service
from tests.kit import models
from tests.kit.application import Application
from tests.kit.stack import Stack, running_stack

SERVICES = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
    "inference.GRPCInferenceService",
    "tensorflow.serving.ModelService",
    "tensorflow.serving.PredictionService",
]
ASK = reflection_pb2.ServerReflectionRequest
X = np.arange(4, dtype=np.float32).reshape(2, 2)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("reflection")
    with running_stack(folder) as stack:
        stack.push("m", models.scale(folder / "m.onnx"))
        yield stack


def test_a_client_calls_with_what_reflection_tells_it(stack: Stack) -> None:
    with grpc.insecure_channel(stack.grpc) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        assert sorted(database.get_services()) == SERVICES
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName("inference.GRPCInferenceService").FindMethodByName("ModelInfer")
        request_class = message_factory.GetMessageClass(method.input_type)
        response_class = message_factory.GetMessageClass(method.output_type)
        request: Any = request_class(model_name="m", raw_input_contents=[X.tobytes()])
        request.inputs.add(name="x", datatype="FP32", shape=X.shape)
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer", request_class.SerializeToString, response_class.FromString
        )
        response = call(request)
        assert np.frombuffer(response.raw_output_contents[0], np.float32).tolist() == (2 * X).ravel().tolist()
        config = pool.FindMessageTypeByName("inference.ModelConfig")
        assert "max_batch_size" in config.fields_by_name


def test_the_version_1_of_the_protocol_has_the_same_answers(stack: Stack) -> None:
    with grpc.insecure_channel(stack.grpc) as channel:
        answers = []
        for version in ("v1", "v1alpha"):
            call = channel.stream_stream(
                f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
                ASK.SerializeToString,
                reflection_pb2.ServerReflectionResponse.FromString,
            )
            asked = [ASK(list_services=""), ASK(file_containing_symbol="inference.ModelInferRequest")]
            answers.append(list(call(iter(asked))))
        assert answers[0] == answers[1]
        assert len(answers[0]) == 2


def test_odd_questions_have_answers(stack: Stack) -> None:
    with grpc.insecure_channel(stack.grpc) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = [
            ASK(file_containing_symbol="nothing"),
            ASK(file_by_filename="onnx/onnx.proto"),  # a library of this process, not of this port
            ASK(file_by_filename="../../etc/passwd"),
            ASK(file_containing_symbol="x" * 10_000),
            ASK(),
        ]
        codes = [answer.error_response.error_code for answer in stub.ServerReflectionInfo(iter(asked))]
        assert codes == [5, 5, 5, 5, 3]  # NOT_FOUND, INVALID_ARGUMENT
        raw = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        with pytest.raises(grpc.RpcError) as refused:
            list(raw(iter([b"\xff\xff no message"])))
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def services(channel: grpc.aio.Channel) -> list[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    answers = stub.ServerReflectionInfo(iter([ASK(list_services="")]))
    return [service.name async for answer in answers for service in answer.list_services_response.service]


@pytest.mark.anyio
async def test_an_idle_stream_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(millstream.gateway.grpc.methods.service, "IDLE_S", 600.0)
    async with Application(tmp_path, grpc_port=0).grpc_channel() as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(ASK(list_services=""))
        assert (await call.read()).HasField("list_services_response")
        # It waits for the second request already: the short time begins with the answer to that.
        monkeypatch.setattr(millstream.gateway.grpc.methods.service, "IDLE_S", 0.05)
        await call.write(ASK(list_services=""))
        assert (await call.read()).HasField("list_services_response")
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK
