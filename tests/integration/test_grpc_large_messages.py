"""Large gRPC messages: those whose like was seen before are received in shared memory, and answered as all others."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.kit import http2, models
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.wait import wait_until

SHAPE = (1, 3, 224, 224)
CALLERS, CALLS = 8, 12
WAIT_S = 120.0
generator = np.random.default_rng(3)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("large")
    served = {"means": models.image_means(folder / "means.onnx")}
    with running_stack(folder, models=served) as stack:
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    means(served, image())  # from now on such messages are known
    yield served
    assert_quiet(served)


def image() -> np.ndarray:
    return generator.standard_normal(SHAPE).astype(np.float32)


def request(data: np.ndarray, name: str = "image", shape: tuple[int, ...] = SHAPE) -> pb.ModelInferRequest:
    built = pb.ModelInferRequest(model_name="means", raw_input_contents=[data.tobytes()])
    built.inputs.add(name=name, datatype="FP32", shape=shape)
    return built


def means(stack: Stack, data: np.ndarray) -> np.ndarray:
    with grpc.insecure_channel(stack.grpc, [("grpc.use_local_subchannel_pool", 1)]) as channel:
        reply = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(request(data), timeout=WAIT_S)
    return np.frombuffer(reply.raw_output_contents[0], np.float32)


def in_use_bytes(stack: Stack) -> float:
    return stack.metrics().value("millstream_segment_in_use_bytes")


def test_concurrent_calls_get_their_own_answers(stack: Stack) -> None:
    images = [image() for _ in range(CALLERS * CALLS)]
    with ThreadPoolExecutor(CALLERS) as pool:
        answers = list(pool.map(lambda data: means(stack, data), images))
    for data, answer in zip(images, answers, strict=True):
        np.testing.assert_allclose(answer, data.mean(axis=(2, 3))[0], atol=1e-5)


@pytest.mark.parametrize("reset", [True, False], ids=["its call is reset", "its connection is closed"])
def test_a_half_sent_message_is_in_shared_memory_until_it_ends(stack: Stack, reset: bool) -> None:
    message = request(image()).SerializeToString()
    client = http2.Connection(int(stack.grpc.rpartition(":")[2]))
    stream = client.begin(http2.INFER)
    assert client.give(stream, http2.prefix(len(message)) + message[: len(message) // 2])
    wait_until(lambda: in_use_bytes(stack) >= len(message), what="the message is in shared memory")
    np.testing.assert_allclose(means(stack, np.ones(SHAPE, np.float32)), 1.0, atol=1e-5)
    if reset:
        client.send(http2.frame(http2.RST_STREAM, 0, stream, bytes(4)))
    else:
        client.close()
    wait_until(lambda: in_use_bytes(stack) == 0, what="its memory is free")
    with suppress(OSError):
        client.close()


def test_a_message_that_only_seems_known_is_read_as_it_is(stack: Stack) -> None:
    """It has the length and the first bytes of a known one, another shape, and an input of another name."""
    wrong = request(image(), "imagX", (1, 224, 3, 224))
    assert len(wrong.SerializeToString()) == len(request(image()).SerializeToString())
    with grpc.insecure_channel(stack.grpc) as channel, pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(wrong, timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "image" in caught.value.details()


def test_a_known_message_in_one_byte_frames_is_answered(stack: Stack) -> None:
    """The first parts are too short to tell what the message is: then it is received elsewhere."""
    data = image()
    message = request(data).SerializeToString()
    client = http2.Connection(int(stack.grpc.rpartition(":")[2]))
    stream = client.begin(http2.INFER)
    head = http2.prefix(len(message)) + message[:20]
    for byte in head:
        assert client.give(stream, bytes((byte,)))
    assert client.give(stream, message[20:], end=True)
    answer = b""
    while stream not in client.ended:
        answer += b"".join(one.payload for one in client.take() if one.kind == http2.DATA)
    client.close()
    reply = pb.ModelInferResponse.FromString(answer[len(http2.prefix(0)) :])
    found = np.frombuffer(reply.raw_output_contents[0], np.float32)
    np.testing.assert_allclose(found, data.mean(axis=(2, 3))[0], atol=1e-5)
