"""Traces of requests, as a collector receives them from a running product. Calls over gRPC: test_grpc_tracing.py."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.kit import models, v2
from tests.kit.command_line import Millstream
from tests.kit.otlp import Collector, Seen, http_collector
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.traces import SERVER, access_lines, assert_whole, new_trace
from tests.kit.wait import wait_until

X = np.arange(4, dtype=np.float32).reshape(2, 2)
INFER = "/v2/models/m/infer"
KEY = "the-admin-key-of-this-test"
SECRETS = (
    KEY,
    "secret-in-a-header",
    "secret-in-a-query",
    "secret-in-a-body",
    "secret-in-metadata",
    "4711.625",
    "NDcxMS42MjU",
)


class Traced(NamedTuple):
    stack: Stack
    collector: Collector


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("tracing")
    with http_collector() as collector:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=team%20a",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
            "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        }
        settings = {"tracing": True, "tracing_slow_s": 30, "access_log": "file", "admin_key": KEY}
        with running_stack(folder, settings=settings, environment=environment) as stack:
            stack.push("m", models.scale(folder / "m.onnx"))
            yield Traced(stack, collector)


@pytest.fixture
def traced(served: Traced) -> Iterator[Traced]:
    yield served
    assert_quiet(served.stack)


def infer(stack: Stack, traceparent: str, path: str = INFER, *, status: int = 200) -> None:
    body, headers = v2.request({"x": X}, binary=False)
    reply = stack.http.post(path, content=body, headers=headers | {"traceparent": traceparent})
    assert reply.status_code == status, reply.text


def grpc_request() -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="m", raw_input_contents=[X.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=X.shape)
    return request


def test_rest_request_is_one_trace_from_its_caller_to_the_run(traced: Traced) -> None:
    stack, collector = traced
    trace_id, parent, header = new_trace()
    infer(stack, header)
    spans = collector.of(trace_id)
    server = spans["POST /v2/models/{model}/infer"]
    assert_whole(spans, server, parent)
    assert server.attributes["http.response.status_code"] == 200
    assert server.attributes["url.path"] == INFER
    assert collector.headers[-1]["x-tenant"] == "team a"


def test_requests_of_other_protocols_are_traced_through_the_lane(traced: Traced) -> None:
    stack, collector = traced
    trace_id, parent, header = new_trace()
    body = {"instances": X.tolist()}
    reply = stack.http.post("/v1/models/m:predict", json=body, headers={"traceparent": header})
    assert reply.status_code == 200
    spans = collector.of(trace_id)
    server = next(span for span in spans.values() if span.kind == SERVER)
    assert_whole(spans, server, parent)
    assert server.attributes["http.route"].startswith("/v1/models/")


def test_each_request_of_a_grpc_stream_has_its_spans(traced: Traced) -> None:
    stack, collector = traced
    trace_id, _, header = new_trace()
    with grpc.insecure_channel(stack.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        replies = stub.ModelStreamInfer(
            iter([grpc_request(), grpc_request()]), metadata=(("traceparent", header),), timeout=120
        )
        assert len(list(replies)) == 2

    def both() -> list[Seen]:
        found = [span for span in list(collector.spans) if span.trace_id == trace_id and span.kind == SERVER]
        return found if len(found) == 2 else []

    assert all(span.name.endswith("/ModelStreamInfer") for span in wait_until(both, what="both requests"))


def test_batch_links_to_its_requests(traced: Traced) -> None:
    stack, collector = traced
    trace_id, _, header = new_trace()
    infer(stack, header)
    spans = collector.of(trace_id)
    server = spans["POST /v2/models/{model}/infer"]
    (link,) = spans["worker"].links
    batch = collector.of_batch(link[0])
    assert (batch["batch"].span_id, batch["batch"].links) == (link[1], [(trace_id, server.span_id)])
    assert {"queue", "gather", "run", "split"} <= batch.keys()
    assert batch["batch"].attributes["millstream.run.rows"] == 2


def test_sampling_follows_the_caller_and_keeps_failures(traced: Traced) -> None:
    stack, collector = traced
    not_sampled, _, header = new_trace()
    infer(stack, header[:-2] + "00")
    refused, _, header = new_trace()
    infer(stack, header, "/v2/models/none/infer", status=404)
    server = next(span for span in collector.of(refused).values() if span.kind == SERVER)
    assert (server.attributes["http.response.status_code"], server.failed) == (404, False)
    # Exported in the order in which they finished: the first one would be there by now.
    assert not [span for span in collector.spans if span.trace_id == not_sampled]


@pytest.mark.parametrize(
    "header", ["", "00-zz", f"00-{'0' * 32}-{'1' * 16}-01", f"ff-{'1' * 32}-{'1' * 16}-01", "x" * 900]
)
def test_unusable_traceparent_is_ignored(traced: Traced, header: str) -> None:
    infer(traced.stack, header)


def test_caller_that_goes_away_is_a_trace_of_its_own(traced: Traced) -> None:
    stack, collector = traced
    trace_id, _, header = new_trace()
    body, headers = v2.request({"x": X}, binary=False)
    connection = HTTPConnection("127.0.0.1", stack.port, timeout=120)
    connection.request("POST", INFER, body, headers | {"traceparent": header})
    connection.close()
    server = next(span for span in collector.of(trace_id).values() if span.kind == SERVER)
    assert server.attributes["http.response.status_code"] in {200, 499}


def test_the_last_request_of_a_connection_is_observed_and_the_connection_closed(traced: Traced) -> None:
    """With traces or an access log, such a request was neither logged nor traced, and its connection stayed open."""
    stack, collector = traced
    trace_id, parent, header = new_trace()
    body, headers = v2.request({"x": X}, binary=False)
    lines = {**headers, "traceparent": header, "connection": "close", "host": "m", "content-length": str(len(body))}
    head = f"POST {INFER} HTTP/1.1\r\n" + "".join(f"{name}: {value}\r\n" for name, value in lines.items()) + "\r\n"
    with socket.create_connection(("127.0.0.1", stack.port), timeout=120) as connection:
        connection.sendall(head.encode() + body)
        reply = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    assert reply.startswith(b"HTTP/1.1 200 ")
    spans = collector.of(trace_id)
    assert_whole(spans, spans["POST /v2/models/{model}/infer"], parent)
    [line] = access_lines(stack, trace_id, 1)
    assert '"POST /v2/models/m/infer" 200 ' in line
    assert "Traceback" not in (stack.home / "logs" / "gateway-0.log").read_text()


def test_each_request_is_a_line_of_the_access_log(traced: Traced) -> None:
    stack = traced.stack
    trace_id, _, header = new_trace()
    infer(stack, header)
    infer(stack, header, "/v2/models/none/infer", status=404)
    stack.http.post("/v1/models/m:predict", json={"instances": X.tolist()}, headers={"traceparent": header})
    stack.http.get("/v2/health/live", headers={"traceparent": header})
    with grpc.insecure_channel(stack.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(grpc_request(), metadata=(("traceparent", header),), timeout=120)
        unknown = grpc_request()
        unknown.model_name = "none"
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(unknown, metadata=(("traceparent", header),), timeout=120)
    lines = access_lines(stack, trace_id, 6)
    shown = [line.partition("127.0.0.1")[2] for line in lines]
    for number, begin in enumerate(
        (
            ' "POST /v2/models/m/infer" 200 ',
            ' "POST /v2/models/none/infer" 404 ',
            ' "POST /v1/models/m:predict" 200 ',
            ' "GET /v2/health/live" 200 ',
        )
    ):
        assert shown[number].startswith(begin), lines
    assert '"/inference.GRPCInferenceService/ModelInfer" OK ' in lines[4]
    assert '"/inference.GRPCInferenceService/ModelInfer" NOT_FOUND ' in lines[5]
    assert " m:1 rows 2 (request " in lines[0]


def test_logs_command_shows_access_lines_only_where_asked(traced: Traced) -> None:
    stack = traced.stack
    trace_id, _, header = new_trace()
    infer(stack, header)
    access_lines(stack, trace_id)
    run = Millstream(stack.home).run
    assert trace_id in run("logs", "access").stdout
    assert trace_id not in run("logs").stdout
    (line,) = [line for line in run("logs", "access", "--json").stdout.splitlines() if trace_id in line]
    assert json.loads(line)["process"] == "gateway-0-access"


def test_no_secret_and_no_tensor_is_in_a_log_or_a_span(traced: Traced) -> None:
    stack, collector = traced
    trace_id, _, traceparent = new_trace()
    value = np.array([[4711.625, 1.0]], np.float32)
    headers = {
        "traceparent": traceparent,
        "authorization": f"Bearer {KEY}",
        "x-api-key": "secret-in-a-header",
        "cookie": "k=secret-in-a-header",
        "tracestate": "v=secret-in-a-header",
    }
    body, length = v2.request({"x": value}, binary=False)
    wrong, wrong_length = v2.request({"x": value.astype(np.float64)}, binary=False)
    query = "?api_key=secret-in-a-query"
    good = {"instances": value.tolist()}
    bad = {"instances": [["secret-in-a-body", "4711.625"]]}
    for path in (INFER + query, "/v2/models/none/infer"):
        stack.http.post(path, content=body, headers=headers | length)
    stack.http.post(INFER, content=wrong, headers=headers | wrong_length)
    for content in (b"{secret-in-a-body", b'{"inputs": "secret-in-a-body"}', b"\xff4711.625"):
        stack.http.post(INFER, content=content, headers=headers)
    for path in ("/v1/models/m:predict", "/endpoints/m/invocations", "/predictions/m", "/v2/models/m/generate"):
        for document in (good, bad):
            stack.http.post(path + query, json=document, headers=headers)
    stack.http.post("/v1/embeddings", json={"model": "m", "input": "secret-in-a-body"}, headers=headers)
    stack.http.get("/admin/v1/models" + query, headers=headers | {"authorization": "Bearer secret-in-a-header"})
    metadata = (
        ("traceparent", traceparent),
        ("authorization", "secret-in-metadata"),
        ("x-api-key", "secret-in-metadata"),
    )
    request = grpc_request()
    request.raw_input_contents[0] = value.tobytes()
    request.inputs[0].shape[:] = value.shape
    broken = pb.ModelInferRequest(model_name="m")
    broken.inputs.add(name="x", datatype="FP32", shape=[1, 2]).contents.fp64_contents[:] = [4711.625, 1.0]
    with grpc.insecure_channel(stack.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        stub.ModelInfer(request, metadata=metadata, timeout=120)
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(broken, metadata=metadata, timeout=120)
        list(stub.ModelStreamInfer(iter([request, broken]), metadata=metadata, timeout=120))
    access_lines(stack, trace_id, 19)
    wait_until(
        lambda: sum(span.trace_id == trace_id and span.kind == SERVER for span in list(collector.spans)) >= 19,
        what="all spans",
    )
    written = b"".join(path.read_bytes() for path in (stack.home / "logs").iterdir()) + b"".join(collector.bodies)
    written += "\n".join(stack.lines).encode()
    for secret in (*map(str.encode, SECRETS), value.tobytes()[:4]):
        assert secret not in written, secret


def last_level_is(stack: Stack, process: str, level: str) -> bool:
    """Whether a process said last that it has this level. It looks once a second."""
    text = (stack.home / "logs" / f"{process}.log").read_text()
    return re.findall(r"millstream.process: log level: ([a-z ]+?)(?: \(|\n)", text)[-1:] == [level]


def test_levels_of_running_processes_change_and_are_reset(traced: Traced) -> None:
    stack = traced.stack
    path = "/admin/v1/log-level"

    assert stack.http.get(path).json() == {"gateway": None, "worker": None, "controller": None}
    assert stack.http.put(path, json={"worker": "debug", "gateway": "debug"}).json()["worker"] == "debug"
    for process in ("gateway-0", "cpu-0"):
        wait_until(partial(last_level_is, stack, process, "debug"), what=f"{process} logs more")
    stack.push("louder", models.scale(stack.home.parent / "louder.onnx"))
    assert " DEBUG millstream.router: lane opened: louder" in stack.logs()
    assert stack.http.put(path, json={"worker": None, "gateway": None}).json()["worker"] is None
    for process in ("gateway-0", "cpu-0"):
        wait_until(partial(last_level_is, stack, process, "the default"), what=f"{process} logs less")
    refused: list[object] = [{}, [], {"redis": "debug"}, {"worker": "loud"}, {"worker": ["debug"]}, {"worker": 10}]
    for wrong in refused:
        assert stack.http.put(path, json=wrong).status_code == 400


def test_signal_to_the_supervisor_makes_all_processes_verbose(traced: Traced) -> None:
    stack = traced.stack
    for said in ("debug", "the default"):
        stack.process.send_signal(signal.SIGUSR2)
        for process in ("gateway-0", "cpu-0"):
            wait_until(partial(last_level_is, stack, process, said), what=f"{process} says {said}")


def test_head_and_unknown_methods_are_logged_as_sent(traced: Traced) -> None:
    stack = traced.stack
    trace_id, _, header = new_trace()
    for method in ("HEAD", "OPTIONS"):
        stack.http.request(method, "/v2/models/m", headers={"traceparent": header})
    lines = access_lines(stack, trace_id, 2)
    assert '"HEAD /v2/models/m" 200 ' in lines[0]
    assert '"OPTIONS /v2/models/m" 405 ' in lines[1]


def test_signal_makes_one_process_verbose_and_quiet_again(traced: Traced) -> None:
    stack = traced.stack
    before = stack.pids()
    for process in ("gateway-0", "cpu-0"):
        log = stack.home / "logs" / f"{process}.log"

        def said(log: Path, expected: list[str]) -> bool:
            return re.findall("SIGUSR2: log level: (.+)", log.read_text()) == expected

        for expected in (["debug"], ["debug", "the default"]):
            os.kill(stack.pids()[process], signal.SIGUSR2)
            wait_until(partial(said, log, expected), what=f"{process} says {expected}")
    assert b" drain" not in (stack.home / "logs" / "cpu-0.log").read_bytes()
    assert stack.pids() == before


def test_collector_that_is_away_costs_no_request(tmp_path: Path) -> None:
    with http_collector() as collector:
        url = collector.url
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": url}
    settings = {"tracing": True, "access_log": "stdout"}  # in the gateway's own log
    with running_stack(tmp_path, settings=settings, environment=environment) as stack:
        stack.push("m", models.scale(tmp_path / "m.onnx"))
        for _ in range(20):
            infer(stack, new_trace()[2])
        dropped = "millstream_traced_requests_dropped_total"
        wait_until(lambda: stack.metrics().value(dropped, reason="export_failed") > 0, what="dropped traces")
        for _ in range(20):
            infer(stack, new_trace()[2])
        wait_until(lambda: stack.metrics().value(dropped, reason="export_failed") >= 40, what="all are counted")
        assert stack.logs().count("could not be exported") == 1
        wait_until(lambda: stack.logs().count('"POST /v2/models/m/infer" 200 ') == 40, what="40 lines")
        assert stack.logs().count(" m:1 rows 2 (request ") == 40


def test_tracing_without_its_settings_says_what_is_wrong(tmp_path: Path) -> None:
    environment = {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}
    with (
        pytest.raises(AssertionError, match="OTEL_EXPORTER_OTLP_PROTOCOL: 'http/json' is not supported"),
        running_stack(tmp_path, settings={"tracing": True}, environment=environment),
    ):
        raise RuntimeError("it must not start")
