"""Traces and access lines of gRPC calls, which are the same whichever way the server answers.

Each call is sent twice: the server answers the second one without the handler.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from millstream.services.repository.folder import FolderRepository
from tests.kit.otlp import Collector, Seen, http_collector
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.traces import SERVER, access_lines, assert_whole, new_trace
from tests.kit.versions import publish_simulated
from tests.kit.wait import wait_until

METHOD = "inference.GRPCInferenceService/ModelInfer"
X = np.ones((1, 4), np.float32)
SLOW_S = 2.0


class Traced(NamedTuple):
    stack: Stack
    collector: Collector
    stub: service_pb2_grpc.GRPCInferenceServiceStub


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    with http_collector() as collector:
        environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
            "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        }
        settings = {"tracing": True, "tracing_slow_s": 30, "access_log": "file"}
        folder = tmp_path_factory.mktemp("traced")
        with (
            running_stack(
                folder, settings=settings, environment=environment, pools="simulated=1,backend=simulated"
            ) as stack,
            grpc.insecure_channel(stack.grpc) as channel,
        ):
            for name, run_s in (("m", 0.0), ("slow", SLOW_S)):
                publish_simulated(FolderRepository(stack.home / "repository"), name, {"run_s": run_s})
                wait_until(lambda: stack.http.get(f"/v2/models/{name}/ready").status_code == 200, what="it is ready")  # noqa: B023
            yield Traced(stack, collector, service_pb2_grpc.GRPCInferenceServiceStub(channel))


@pytest.fixture
def traced(served: Traced) -> Iterator[Traced]:
    yield served
    assert_quiet(served.stack)


def request_of(model: str = "m") -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[X.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=X.shape)
    return request


def call(traced: Traced, header: str, model: str = "m", timeout_s: float = 120) -> None:
    traced.stub.ModelInfer(request_of(model), metadata=(("traceparent", header),), timeout=timeout_s)


def server_spans(traced: Traced, trace_id: str, count: int) -> list[Seen]:
    def seen() -> list[Seen]:
        spans = [span for span in list(traced.collector.spans) if span.trace_id == trace_id and span.kind == SERVER]
        return spans if len(spans) >= count else []

    return wait_until(seen, what="the spans of all calls")


def test_a_call_is_one_trace_and_a_line_of_the_access_log(traced: Traced) -> None:
    for _ in range(3):
        trace_id, parent, header = new_trace()
        call(traced, header)
        spans = traced.collector.of(trace_id)
        server = spans[METHOD]
        assert_whole(spans, server, parent, rows=1)
        assert server.attributes["rpc.grpc.status_code"] == 0
        [line] = access_lines(traced.stack, trace_id)
        assert f'"/{METHOD}" OK ' in line
        assert " m:1 rows 1 (request " in line
        assert " 127.0.0.1 " in line


def test_calls_that_are_not_sampled_are_lines_alone(traced: Traced) -> None:
    headers = [(trace_id, header[:-2] + "00") for trace_id, _, header in (new_trace() for _ in range(3))]
    for _, header in headers:
        call(traced, header)
    later, _, header = new_trace()
    call(traced, header)
    server_spans(traced, later, 1)
    for trace_id, _ in headers:
        assert len(access_lines(traced.stack, trace_id)) == 1
        # Exported in the order in which they finished: they would be there by now.
        assert not [span for span in list(traced.collector.spans) if span.trace_id == trace_id]


def failure_of(traced: Traced, header: str, model: str, timeout_s: float) -> str:
    """Return the status of a call, made again if the client library lost it to the end of an old connection."""
    while True:
        with pytest.raises(grpc.RpcError) as raised:
            call(traced, header, model, timeout_s)
        if "Socket closed" not in raised.value.details():
            return str(raised.value.code().name)


def test_calls_that_fail_say_how(traced: Traced) -> None:
    """No model, and a deadline that is too short for the run, which the server predicts, or a client notices."""
    trace_id, _, header = new_trace()
    call(traced, header, "slow")
    late = {"RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED", "CANCELLED"}
    for model, timeout_s, codes in (("none", 120.0, {"NOT_FOUND"}), ("slow", SLOW_S / 2, late)):
        for _ in range(2):
            assert failure_of(traced, header, model, timeout_s) in codes
    said = [line.partition(f'"/{METHOD}" ')[2].split()[0] for line in access_lines(traced.stack, trace_id, 5)]
    assert said[0] == "OK"
    assert sorted(said[1:3]) == ["NOT_FOUND"] * 2
    assert set(said[3:]) <= late
    found = [span.attributes["rpc.grpc.status_code"] for span in server_spans(traced, trace_id, 5)]
    assert (found.count(0), found.count(5)) == (1, 2)


def test_calls_whose_client_goes_away_are_counted_and_lines(traced: Traced) -> None:
    def cancelled() -> float:
        return traced.stack.metrics().value("millstream_grpc_calls_total", code="CANCELLED")

    before = cancelled()
    trace_id, _, header = new_trace()
    call(traced, header, "slow")
    for _ in range(2):
        future = traced.stub.ModelInfer.future(request_of("slow"), metadata=(("traceparent", header),), timeout=120)
        wait_until(lambda: traced.stack.metrics().value("millstream_requests_in_flight") == 1, what="it runs")
        future.cancel()
        wait_until(lambda: traced.stack.metrics().value("millstream_requests_in_flight") == 0, what="it is over")
    lines = access_lines(traced.stack, trace_id, 3)
    assert [f'"/{METHOD}" CANCELLED ' in line for line in lines] == [False, True, True]
    wait_until(lambda: cancelled() == before + 2, what="they are counted")
    assert len(server_spans(traced, trace_id, 3)) == 3
