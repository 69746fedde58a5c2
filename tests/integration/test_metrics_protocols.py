"""A stack on which every protocol was used: each is counted under its name, and promtool takes the page."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from millstream.services.metrics.catalogue import CATALOGUE
from tests.kit import models, tools, v2
from tests.kit.metrics import Page
from tests.kit.metrics_reference import protocols
from tests.kit.stack import Stack, assert_quiet, running_stack, sigstopped
from tests.kit.wait import wait_until

ROW = [0.0] * 64
INFER = "/v2/models/{model}/infer"
VERSION_INFER = "/v2/models/{model}/versions/{version}/infer"
BODY_BYTES_MAX = 1 << 20
CALLS = "millstream_grpc_calls_total"
REPLIES = "millstream_http_requests_total"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("protocols")
    vertex = {"vertex_predict_route": "/vertex:predict", "sagemaker_model": "m"}
    settings = {"request_bytes_max": BODY_BYTES_MAX, "queue_lease_s": 2, "open_control": True, **vertex}
    with running_stack(folder, pools="cpu=1", settings=settings) as stack:
        stack.push("m", models.mlp(folder / "m.onnx"))
        stack.push("e", models.embeddings(folder / "e.onnx"))
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    yield served
    assert_quiet(served)


def increase(before: Page, after: Page, name: str, **labels: str) -> float:
    return after.value(name, **labels) - before.value(name, **labels)


def infer_body() -> tuple[bytes, dict[str, str]]:
    return v2.request({"input": np.zeros((1, 64), np.float32)})


def grpc_request(model: str = "m", columns: int = 64) -> pb.ModelInferRequest:
    tensor = pb.ModelInferRequest.InferInputTensor(name="input", datatype="FP32", shape=[1, columns])
    raw = np.zeros((1, columns), np.float32).tobytes()
    return pb.ModelInferRequest(model_name=model, inputs=[tensor], raw_input_contents=[raw])


#: protocol -> a call that succeeds, and one that the version refuses: path and JSON
HTTP_CALLS = {
    "generate": ("/v2/models/m/generate", {"input": ROW}, {"input": ["x"]}),
    "tfserving": ("/v1/models/m:predict", {"instances": [ROW]}, {"instances": 3}),
    "sagemaker": ("/endpoints/m/invocations", {"instances": [ROW]}, {"instances": [["x"]]}),
    "vertex": ("/vertex:predict", {"instances": [ROW]}, {"instances": [["x"]]}),
    "openai": ("/v1/embeddings", {"model": "e", "input": [[1, 2]]}, {"model": "m", "input": [[1, 2]]}),
    "torchserve": ("/predictions/m", [ROW], [["x"]]),
}


@pytest.mark.parametrize("protocol", HTTP_CALLS)
def test_requests_over_http_are_counted_under_their_protocol(stack: Stack, protocol: str) -> None:
    path, good, bad = HTTP_CALLS[protocol]
    before = stack.metrics()
    assert stack.http.post(path, json=good).status_code == 200
    assert stack.http.post(path, json=bad).status_code in {400, 424}  # a ModelError of SageMaker
    after = stack.metrics()
    for outcome in ("ok", "invalid"):
        assert increase(before, after, "millstream_requests_total", protocol=protocol, outcome=outcome) == 1
    assert increase(before, after, "millstream_request_duration_seconds_count", protocol=protocol) == 1
    assert increase(before, after, "millstream_requests_total") == 2


def test_requests_of_the_fast_path_are_counted_by_status(stack: Stack) -> None:
    body, headers = infer_body()
    before = stack.metrics()
    for path in ("/v2/models/m/infer", "/v2/models/m/versions/1/infer", "/v2/models/m/versions/1/infer"):
        assert stack.http.post(path, content=body, headers=headers).status_code == 200
    closing = {**headers, "Connection": "close"}
    assert stack.http.post("/v2/models/m/infer", content=body, headers=closing).status_code == 200
    for unknown in ("m0", "m1", "m2"):
        assert stack.http.post(f"/v2/models/{unknown}/infer", content=body, headers=headers).status_code == 404
    assert stack.http.post("/v2/models/m/versions/1/infer", content=b"{").status_code == 400
    assert stack.http.post("/v2/models/m/infer", content=bytes(BODY_BYTES_MAX + 1)).status_code == 413
    with socket.create_connection(("127.0.0.1", stack.port)) as connection:
        connection.sendall(b"NOT HTTP\r\n\r\n")
        assert b" 400 " in connection.makefile("rb").readline()
    after = stack.metrics()
    counted = {
        (route, method, status): increase(before, after, REPLIES, route=route, method=method, status=status)
        for route in (INFER, VERSION_INFER, "other")
        for method in ("POST", "other")
        for status in ("200", "400", "404", "413")
    }
    assert {labels: count for labels, count in counted.items() if count} == {
        (INFER, "POST", "200"): 2,
        (INFER, "POST", "404"): 3,
        (INFER, "POST", "413"): 1,
        (VERSION_INFER, "POST", "200"): 2,
        (VERSION_INFER, "POST", "400"): 1,
        ("other", "other", "400"): 1,
    }
    assert increase(before, after, "millstream_requests_total", protocol="v2", outcome="ok") == 4


def test_calls_over_grpc_are_counted_by_code(stack: Stack) -> None:
    before = stack.metrics()
    with grpc.insecure_channel(stack.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        assert stub.ServerLive(pb.ServerLiveRequest()).live
        stub.ModelInfer(grpc_request())
        for wrong, code in ((grpc_request("nope"), "NOT_FOUND"), (grpc_request(columns=63), "INVALID_ARGUMENT")):
            with pytest.raises(grpc.RpcError) as refused:
                stub.ModelInfer(wrong)
            assert refused.value.code().name == code
        replies = list(stub.ModelStreamInfer(iter([grpc_request(), grpc_request(columns=63), grpc_request()])))
        assert [bool(reply.error_message) for reply in replies] == [False, True, False]
        health = health_pb2_grpc.HealthStub(channel)
        assert health.Check(health_pb2.HealthCheckRequest()).status == health_pb2.HealthCheckResponse.SERVING
        watch = health.Watch(health_pb2.HealthCheckRequest())
        next(watch)
        watch.cancel()
        for number in range(3):
            with pytest.raises(grpc.RpcError):
                channel.unary_unary(f"/inference.GRPCInferenceService/Method{number}")(b"")
        wait_until(lambda: stack.metrics().value(CALLS, method="Watch", code="CANCELLED"), what="the watch has ended")
    expected = {
        ("ServerLive", "OK"): 1,
        ("ModelInfer", "OK"): 1,
        ("ModelInfer", "NOT_FOUND"): 1,
        ("ModelInfer", "INVALID_ARGUMENT"): 1,
        ("ModelStreamInfer", "OK"): 1,
        ("Check", "OK"): 1,
        ("Watch", "CANCELLED"): 1,
        ("other", "UNIMPLEMENTED"): 3,
    }
    # A call is counted when it has ended, which its caller may know before.
    wait_until(lambda: _calls_since(before, stack) == expected, what="each call is counted")
    after = stack.metrics()
    assert increase(before, after, "millstream_requests_total", protocol="grpc", outcome="ok") == 3
    assert increase(before, after, "millstream_requests_total", protocol="grpc", outcome="invalid") == 2


def _calls_since(before: Page, stack: Stack) -> dict[tuple[str, str], float]:
    """The calls by method and code."""
    after = stack.metrics()
    counted = {
        (sample.labels["method"], sample.labels["code"]): increase(before, after, CALLS, **sample.labels)
        for sample in after.samples
        if sample.name == CALLS
    }
    return {labels: count for labels, count in counted.items() if count}


def test_a_batch_of_several_protocols_is_counted_under_each(stack: Stack) -> None:
    """While the worker is stopped, requests of three protocols wait; then they run together."""
    body, headers = infer_body()
    before = stack.metrics()
    with grpc.insecure_channel(stack.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        with sigstopped(stack.pids()["cpu-0"]):
            connections = [stack.send("/v2/models/m/infer", body, headers) for _ in range(12)]
            calls = [stub.ModelInfer.future(grpc_request()) for _ in range(12)]
            json = b'{"instances": [[' + b", ".join([b"0"] * 64) + b"]]}"
            connections += [
                stack.send("/v1/models/m:predict", json, {"Content-Type": "application/json"}) for _ in range(12)
            ]
            wait_until(lambda: stack.metrics().value("millstream_requests_in_flight") == 36)
        for connection in connections:
            assert connection.getresponse().status == 200
            connection.close()
        for call in calls:
            call.result()
    after = stack.metrics()
    for protocol in ("v2", "grpc", "tfserving"):
        assert increase(before, after, "millstream_requests_total", protocol=protocol, outcome="ok") == 12
        assert increase(before, after, "millstream_request_duration_seconds_count", protocol=protocol) == 12


def test_every_process_is_measured(stack: Stack) -> None:
    names, up = ("gateway-0", "worker-cpu-0"), "millstream_redis_up"
    wait_until(lambda: all(stack.metrics().value(up, process=name) for name in names), what="Redis answers both")
    page = stack.metrics()
    for name in names:
        at = {"process": name}
        assert page.value("millstream_process_cpu_seconds_total", **at) > 0
        assert page.value("millstream_process_resident_memory_bytes", **at) > 10 << 20
        assert page.value("millstream_process_open_fds", **at) > 3
        assert page.value("millstream_process_max_fds", **at) >= page.value("millstream_process_open_fds", **at)
        assert page.value("millstream_process_threads", **at) >= 1
        assert page.value("millstream_process_start_time_seconds", **at) > 1e9
    assert page.label_values("process") == {"gateway-0", "worker-cpu-0"}


def test_loads_and_their_failures_are_counted(stack: Stack, tmp_path: Path) -> None:
    page = stack.metrics()
    assert page.value("millstream_model_load_duration_seconds_count", model="m", version="1", pool="cpu") == 1
    assert page.value("millstream_model_load_duration_seconds_sum", model="m") > 0
    assert page.value("millstream_model_load_failures_total", model="m") == 0
    stack.push("broken", models.mlp(tmp_path / "m.onnx"), activate=False)
    stack.http.post("/v2/repository/models/broken/unload").raise_for_status()
    for path in (stack.home / "repository").rglob("broken/**/*.onnx"):
        path.chmod(0o600)
        path.write_bytes(b"not a model")
    stack.http.post("/v2/repository/models/broken/load")
    wait_until(lambda: stack.metrics().value("millstream_model_load_failures_total", model="broken") >= 1)
    assert stack.http.delete("/admin/v1/models/broken").status_code == 204


def test_redis_that_does_not_answer_is_shown(stack: Stack) -> None:
    """The page is answered without Redis; the gauge of each process falls, and rises again."""

    def up() -> dict[str, float]:
        page = stack.metrics()
        return {name: page.value("millstream_redis_up", process=name) for name in ("gateway-0", "worker-cpu-0")}

    before = stack.metrics()
    with sigstopped(stack.pids()["redis"]):
        wait_until(lambda: not any(up().values()), what="Redis counts as away")
    wait_until(lambda: all(up().values()), what="Redis is back")
    wait_until(lambda: stack.http.get("/v2/health/ready").status_code == 200)
    reconnects = ("millstream_redis_reconnects_total", "worker-cpu-0")
    wait_until(lambda: increase(before, stack.metrics(), reconnects[0], process=reconnects[1]) >= 1, what="it says so")


@pytest.mark.needs("promtool")
def test_promtool_takes_the_page_of_a_stack_that_used_every_protocol(stack: Stack) -> None:
    for path, good, _ in HTTP_CALLS.values():
        assert stack.http.post(path, json=good).status_code == 200
    body, headers = infer_body()
    assert stack.http.post("/v2/models/m/infer", content=body, headers=headers).status_code == 200
    with grpc.insecure_channel(stack.grpc) as channel:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(grpc_request())
    page = stack.metrics()
    unused = [name for name in protocols() if not page.value("millstream_requests_total", protocol=name)]
    assert unused == []
    for text, status in ((page.text, 3), (_without_triton(page.text), 0)):
        checked = subprocess.run(
            [tools.program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True, check=False
        )
        said = (checked.stdout + checked.stderr).splitlines()
        assert checked.returncode == status, said
        assert [line for line in said if not line.startswith("nv_")] == []
    reply = stack.http.get("/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    families = {family.name for family in parse_openmetrics(reply.text)}
    assert {metric.name.removesuffix("_total") for metric in CATALOGUE} - families <= _RARE


#: Metrics that a stack without faults does not show.
_RARE = {
    f"millstream_{name}"
    for name in (
        *("batch_checks", "batching_off", "batches_reclaimed", "runs_out_of_memory", "runs_terminated"),
        *("races_ended", "races_waiting", "race_duration_seconds", "variants_swapped", "variants_undone"),
        *("readiness_probes_unanswered", "worker_deaths", "version_refused", "worker_memory_limit_bytes"),
        *("trace_spans_exported", "traced_requests_dropped", "access_log_lines_dropped"),
        *("key_expiry_timestamp_seconds", "tls_certificate_expiry_timestamp_seconds", "key_memory_bytes"),
        "model_unload_duration_seconds",
        *("worker_device_memory_used_bytes", "worker_device_memory_budget_bytes"),
        *(
            "cold_requests",
            "model_cache_misses",
            "load_wait_seconds",
            "evictions",
            "eviction_age_seconds",
            "requests_overflowed",
        ),
        # of the controller, which this stack does not have
        *("controller_leads", "controller_orders", "controller_order_outcomes", "controller_orders_in_flight"),
        *("controller_instances", "controller_round_duration_seconds"),
        *("workers_wanted", "workers_ready", "pool_queue_rows", "pool_oldest_wait_seconds", "pool_utilisation_ratio"),
        *("pool_arrival_rows_per_second", "pool_capacity_rows_per_second"),
    )
}


def _without_triton(text: str) -> str:
    """The page without the names that Triton gave its metrics, which promtool would change."""
    lines = text.splitlines(keepends=True)
    return "".join(line for line in lines if not line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith("nv_"))
