"""Documents made to cost much: each is refused, in every protocol, and neither the gateway's memory nor its callers
notice.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import numpy as np
import orjson
import pytest

from tests.kit import models, v2
from tests.kit.stack import CALL_S_MAX, Stack, assert_quiet, running_stack

MIB = 1 << 20
BOMB = b",".join([b'{"a":{}}'] * (20 * MIB // 9))
DEEP = b"[" * 10 * MIB
MEMORY_KIB_MAX = 1200 * 1024

PATHS = {
    "v2": (
        "/v2/models/m/infer",
        "application/json",
        b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[%b]}]}',
    ),
    "generate": ("/v2/models/m/generate", "application/json", b'{"x":[%b]}'),
    "row form": ("/v1/models/m:predict", "application/json", b'{"instances":[%b]}'),
    "column form": ("/v1/models/m:predict", "application/json", b'{"inputs":{"x":[%b]}}'),
    "examples": ("/v1/models/m:classify", "application/json", b'{"examples":[%b]}'),
    "an event": ("/v1/models/m:predict", "application/cloudevents+json", b'{"data":[%b]}'),
    "invocations": ("/invocations", "application/json", b"[%b]"),
    "endpoint": ("/endpoints/m/invocations", "application/json", b'{"instances":[%b]}'),
    "predictions": ("/predictions/m", "application/json", b'{"data":[%b]}'),
    "predictions, unsaid": ("/predictions/m", "text/plain", b'{"data":[%b]}'),
    "embeddings": ("/v1/embeddings", "application/json", b'{"model":"m","input":[%b]}'),
    "load": ("/v2/repository/models/m/load", "application/json", b'{"parameters":{"config":[%b]}}'),
    "index": ("/v2/repository/index", "application/json", b'{"ready":[%b]}'),
    "trace": ("/v2/trace/setting", "application/json", b'{"trace_level":[%b]}'),
    "log": ("/v2/logging", "application/json", b'{"log_info":[%b]}'),
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("bombs")
    with running_stack(folder) as stack:
        stack.push("m", models.scale(folder / "m.onnx"), version=1)
        yield stack


@pytest.fixture
def stack(one: Stack) -> Iterator[Stack]:
    yield one
    array = np.ones((1, 2), np.float32)
    body, headers = v2.request({"x": array})
    status, answer, replied = post(one, "/v2/models/m/infer", body, headers)
    assert status == 200
    np.testing.assert_array_equal(v2.outputs(answer, replied)["y"], 2 * array)
    assert_quiet(one)


def post(stack: Stack, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, bytes, Mapping[str, str]]:
    reply = stack.http.post(path, content=body, headers=headers)
    return reply.status_code, reply.content, reply.headers


def memory_kib(stack: Stack) -> int:
    """The most that the gateway ever had."""
    text = Path(f"/proc/{stack.pids()['gateway-0']}/status").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("VmHWM")).split()[1])


@pytest.mark.parametrize("name", PATHS)
def test_a_bomb_is_refused(stack: Stack, name: str) -> None:
    path, content_type, around = PATHS[name]
    for inside in (BOMB, DEEP, b",".join([b'""'] * (4 * MIB))):
        status, answer, _ = post(stack, path, around % inside, {"Content-Type": content_type})
        assert status in {400, 413}, answer[:300]
    assert memory_kib(stack) < MEMORY_KIB_MAX


def test_the_largest_body_of_small_objects_takes_little_memory(stack: Stack) -> None:
    path, content_type, around = PATHS["v2"]
    body = around % b",".join([b'{"a":{"a":{"a":[{}]}}}'] * (60 * MIB // 23))
    status, answer, _ = post(stack, path, body, {"Content-Type": content_type})
    assert (status, b"MILLSTREAM_REQUEST_BYTES_MAX" in answer) == (413, True)
    assert memory_kib(stack) < MEMORY_KIB_MAX


@pytest.mark.parametrize("path", ["/v2/models/m/infer", "/v1/models/m:predict", "/invocations", "/predictions/m"])
@pytest.mark.parametrize("encoding", ["deflate", "gzip"])
def test_a_small_body_that_becomes_a_large_one_is_refused(stack: Stack, path: str, encoding: str) -> None:
    pack = zlib.compress if encoding == "deflate" else gzip.compress
    for content in (PATHS["v2"][2] % BOMB, bytes(60 * MIB), b'{"inputs":' + b" " * 60 * MIB + b"1}"):
        body = pack(content)
        assert len(body) < MIB
        status, answer, _ = post(stack, path, body, {"Content-Type": "application/json", "Content-Encoding": encoding})
        assert status == 413, answer[:300]
    assert memory_kib(stack) < MEMORY_KIB_MAX


def test_a_binary_request_with_a_bomb_for_a_head_is_refused(stack: Stack) -> None:
    head = PATHS["v2"][2] % BOMB
    status, answer, _ = post(
        stack, "/v2/models/m/infer", head + bytes(16), {"Inference-Header-Content-Length": str(len(head))}
    )
    assert (status, b"MILLSTREAM_REQUEST_BYTES_MAX" in answer) == (413, True)


def test_sixty_megabytes_of_numbers_are_an_ordinary_request(stack: Stack) -> None:
    stack.push("wide", models.scale(stack.home / "wide.onnx", columns=1_000_000), version=1, config='{"rows_max": 32}')
    array = np.random.default_rng(1).normal(size=(6, 1_000_000)).astype(np.float32)
    body, headers = v2.request({"x": array}, binary=False)
    assert len(body) > 50 * MIB
    status, answer, replied = post(stack, "/v2/models/wide/infer", body, headers)
    assert status == 200, answer[:300]
    np.testing.assert_array_equal(v2.outputs(answer, replied)["y"], 2 * array)
    rows = b'{"instances":[%b]}' % b",".join(
        [orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) for row in array[:3]]
    )
    reply = stack.http.post("/v1/models/wide:predict", content=rows)
    assert reply.status_code == 200, reply.text[:300]
    np.testing.assert_array_equal(np.array(reply.json()["predictions"], np.float32), 2 * array[:3])


def test_grpc_messages_of_millions_of_fields_are_refused(stack: Stack) -> None:
    unit = {"inputs": b"\x2a\x00", "parameters": b"\x22\x00", "raw contents": b"\x3a\x00"}
    with grpc.insecure_channel(stack.grpc) as channel:
        for method in ("ModelInfer", "RepositoryModelLoad"):
            call = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
            for name, field in unit.items():
                with pytest.raises(grpc.RpcError) as refusal:
                    message = (b"\x1a\x00" if method != "ModelInfer" else field) * (20 * MIB)
                    call(message, timeout=CALL_S_MAX, metadata=[("authorization", stack.headers["Authorization"])])
                assert refusal.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, name
    assert memory_kib(stack) < MEMORY_KIB_MAX
