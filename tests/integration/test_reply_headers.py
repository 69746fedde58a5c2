"""Headers that the server adds to replies of every protocol, over real connections to a real gateway."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.kit import models, v2
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.wait import wait_until

MADE = re.compile(r"[0-9a-f]{12}-[0-9a-f]+")
X = np.arange(4, dtype=np.float32).reshape(2, 2)
INSTANCES: dict[str, object] = {"instances": X.tolist()}
LARGE = np.full((64, 2), np.pi, np.float32)
NAMED: dict[str, object] = {"x": X.tolist()}
INFER = "/v2/models/m/infer"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("headers")
    settings = {"request_bytes_max": 1 << 16, "server_timing": True}
    with running_stack(folder, settings=settings) as stack:
        stack.push("m", models.scale(folder / "m.onnx"))
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    yield served
    assert_quiet(served)


#: (method, path, JSON body or None, status) of each protocol: replies, errors of routes, and errors of the router
CALLS: list[tuple[str, str, bytes | str | dict[str, object] | None, int]] = [
    ("POST", INFER, v2.request({"x": X}, binary=False)[0], 200),
    ("POST", INFER, b"[]", 400),
    ("POST", INFER, bytes(1 << 17), 413),
    ("POST", "/v2/models/no/infer", b"{}", 404),
    ("GET", "/v2", None, 200),
    ("GET", "/v2/health/ready", None, 200),
    ("HEAD", "/v2/models/m", None, 200),
    ("DELETE", "/v2", None, 405),
    ("OPTIONS", "/v2", None, 405),
    ("GET", "/nothing", None, 404),
    ("POST", "/v1/models/m:predict", INSTANCES, 200),
    ("POST", "/v1/models/m:predict", {"instances": []}, 400),
    ("POST", "/invocations", INSTANCES, 200),
    ("POST", "/invocations", "{", 400),
    ("POST", "/endpoints/m/invocations", INSTANCES, 200),
    ("POST", "/endpoints/no/invocations", INSTANCES, 400),
    ("POST", "/predictions/no", INSTANCES, 404),
    ("POST", "/v1/embeddings", {"model": "no", "input": "text"}, 404),
    ("GET", "/admin/v1/models", None, 200),
    ("GET", "/metrics", None, 200),
    ("GET", "/docs", None, 200),
    ("GET", "/docs/assets/swagger-ui.css", None, 200),
    ("GET", "/openapi.json", None, 200),
]


@pytest.mark.parametrize(("method", "path", "body", "status"), CALLS, ids=[f"{c[0]} {c[1]} {c[3]}" for c in CALLS])
def test_each_reply_has_the_id_of_its_request(
    stack: Stack, method: str, path: str, body: bytes | str | dict[str, object] | None, status: int
) -> None:
    content = None if isinstance(body, dict) else body
    json = body if isinstance(body, dict) else None
    ids = []
    for sent in ({}, {}, {"X-Request-Id": "mine-1"}, {"X-Request-Id": "x" * 129}, {"X-Request-Id": "a b"}):
        headers = {"Content-Type": "application/json", **sent}
        reply = stack.http.request(method, path, content=content, json=json, headers=headers)
        assert reply.status_code in {status, 503 if path.endswith("/ready") else status}, reply.text
        ids += reply.headers.get_list("x-request-id")
    assert ids.pop(2) == "mine-1"
    assert len(set(ids)) == 4
    assert all(MADE.fullmatch(one) for one in ids)


def test_a_grpc_call_ends_with_its_id(stack: Stack) -> None:
    with grpc.insecure_channel(stack.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="FP32", shape=X.shape)
        request = pb.ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[X.tobytes()])
        made = set()
        for call, message in (
            (stub.ModelInfer, request),
            (stub.ServerReady, pb.ServerReadyRequest()),
            (health_pb2_grpc.HealthStub(channel).Check, health_pb2.HealthCheckRequest()),
        ):
            _, ended = call.with_call(message, metadata=[("x-request-id", "mine-2")])
            assert ("x-request-id", "mine-2") in ended.trailing_metadata()
            _, ended = call.with_call(message, metadata=[("x-request-id", "two words")])
            made.add(dict(ended.trailing_metadata())["x-request-id"])
        assert len(made) == 3
        assert all(MADE.fullmatch(one) for one in made)
        stream = stub.ModelStreamInfer(iter([request, request]), metadata=[("x-request-id", "mine-3")])
        assert len(list(stream)) == 2
        assert ("x-request-id", "mine-3") in stream.trailing_metadata()


def test_a_refused_grpc_call_ends_with_its_id(stack: Stack) -> None:
    with grpc.insecure_channel(stack.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for request, metadata in (
            (pb.ModelInferRequest(model_name="no"), [("x-request-id", "mine-4")]),
            (pb.ModelInferRequest(model_name="m"), [("x-request-id", "mine-4")]),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                stub.ModelInfer(request, metadata=metadata)
            assert ("x-request-id", "mine-4") in refused.value.trailing_metadata()
        proxied = [("x-request-id", "mine-5"), ("x-forwarded-for", "1.2.3.4")]
        with pytest.raises(grpc.RpcError) as forbidden:
            stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="m"), metadata=proxied)
        assert forbidden.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert ("x-request-id", "mine-5") in forbidden.value.trailing_metadata()


def test_a_trace_has_the_id_where_the_body_has_none(stack: Stack) -> None:
    settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "3"}
    assert stack.http.post("/v2/models/m/trace/setting", json=settings).status_code == 200
    path = Path(stack.http.get("/v2/models/m/trace/setting").json()["trace_file"])
    body, headers = v2.request({"x": X})
    named, named_headers = v2.request({"x": X}, id="in-the-body")
    for content, sent in ((body, headers), (named, named_headers)):
        assert stack.http.post(INFER, content=content, headers={**sent, "X-Request-Id": "mine-6"}).status_code == 200
    sent = {"X-Request-Id": "mine-7"}
    assert stack.http.post("/v1/models/m:predict", json=INSTANCES, headers=sent).status_code == 200

    def ids() -> list[str]:
        return re.findall(r'"request_id":\s*"([^"]*)"', path.read_text()) if path.exists() else []

    wait_until(lambda: len(ids()) == 3, what="three traces")
    assert ids() == ["mine-6", "in-the-body", "mine-7"]


TIMING = re.compile(r"lane;dur=(\d+\.\d{3}), queue;dur=(\d+\.\d{3}), run;dur=(\d+\.\d{3})")
INFERENCES: list[tuple[str, bytes | dict[str, object], dict[str, str]]] = [
    (INFER, *v2.request({"x": X})),
    (INFER, *v2.request({"x": LARGE}, binary=False, binary_outputs=False)),  # large enough to be compressed
    ("/v2/models/m/generate", NAMED, {}),
    ("/v1/models/m:predict", INSTANCES, {}),
    ("/invocations", INSTANCES, {}),
    ("/endpoints/m/invocations", INSTANCES, {}),
    ("/predictions/m", NAMED, {}),
]


@pytest.mark.parametrize(("path", "body", "headers"), INFERENCES)
def test_the_reply_to_an_inference_says_where_the_time_went(
    stack: Stack, path: str, body: bytes | dict[str, object], headers: dict[str, str]
) -> None:
    before = time.monotonic()
    if isinstance(body, dict):
        reply = stack.http.post(path, json=body, headers=headers)
    else:
        reply = stack.http.post(path, content=body, headers=headers)
    assert reply.status_code == 200, reply.text
    (value,) = reply.headers.get_list("server-timing")
    found = TIMING.fullmatch(value)
    assert found is not None, value
    lane, queue, run = map(float, found.groups())
    assert 0 < run < run + queue + lane < (time.monotonic() - before) * 1000


def test_a_reply_without_a_run_has_no_timing(stack: Stack) -> None:
    body, headers = v2.request({"x": np.ones((0, 2), np.float32)})
    for reply in (
        stack.http.post(INFER, content=body, headers=headers),
        stack.http.post(INFER, content=b"{}"),
        stack.http.get("/v2/models/m"),
    ):
        assert "server-timing" not in reply.headers


@pytest.mark.parametrize(("path", "body", "headers"), INFERENCES)
def test_a_load_report_is_sent_if_asked_for(
    stack: Stack, path: str, body: bytes | dict[str, object], headers: dict[str, str]
) -> None:
    content = json.dumps(body).encode() if isinstance(body, dict) else body

    def report(wanted: str | None) -> list[str]:
        asked = {} if wanted is None else {"endpoint-load-metrics-format": wanted}
        how = {"Content-Type": "application/json", **headers, **asked}
        reply = stack.http.post(path, content=content, headers=how)
        assert reply.status_code == 200, reply.text
        return reply.headers.get_list("endpoint-load-metrics")

    assert report(None) == report("yaml") == report("") == []
    (text,) = report("TEXT")
    pairs = dict(part.split("=") for part in text.removeprefix("TEXT ").split(", "))
    assert 0 <= float(pairs["application_utilization"]) <= 1
    assert pairs["named_metrics.instances"] == "1"
    (found,) = report("json")
    named = json.loads(found.removeprefix("JSON "))["named_metrics"]
    assert set(named) == {"rows_waiting", "batches_in_flight", "instances"}
    (binary,) = report("Bin")
    read = orca(base64.b64decode(binary.removeprefix("BIN "), validate=True))
    assert set(read) == set(named)
    assert read["instances"] == named["instances"] == 1


def orca(message: bytes) -> dict[str, float]:
    """Return the named metrics of an OrcaLoadReport, read by protobuf with the fields of the published schema."""
    file = descriptor_pb2.FileDescriptorProto(name="orca.proto", package="orca", syntax="proto3")
    report = file.message_type.add(name="OrcaLoadReport")
    entry = report.nested_type.add(name="NamedMetricsEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, type=9, label=1)
    entry.field.add(name="value", number=2, type=1, label=1)
    report.field.add(
        name="named_metrics", number=8, type=11, label=3, type_name=".orca.OrcaLoadReport.NamedMetricsEntry"
    )
    report.field.add(name="application_utilization", number=9, type=1, label=1)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    kind = message_factory.GetMessageClass(pool.FindMessageTypeByName("orca.OrcaLoadReport"))
    read = kind.FromString(message)
    assert 0 <= read.application_utilization <= 1
    return dict(read.named_metrics)
