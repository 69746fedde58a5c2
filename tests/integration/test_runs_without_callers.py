"""A run whose callers have all gone is ended before its deadline: over each protocol, and each way to the worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import grpc
import httpx2
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from tests.integration.test_calls_given_up import runs_now
from tests.kit import models, v2
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.wait import wait_until

ENDLESS = 7  # the element that lets a run go on for ever
PATH = "/v2/models/slow/infer"
PATIENT: dict[str, object] = {"timeout": 600_000_000}  # microseconds: far longer than the test waits
TERMINATED = "millstream_runs_terminated_total"


@pytest.fixture(scope="module", params=[True, False], ids=["direct", "queue"])
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("left")
    settings = {"queue_direct": request.param, "worker_run_s_max": 600}
    model = models.endless(folder / "slow.onnx", on=ENDLESS)
    with running_stack(folder, settings=settings) as stack:
        stack.push("slow", model, config='{"timeout_ms_default": 500000}')
        yield stack
        assert_quiet(stack)


def directly(stack: Stack) -> float:
    """Return how many batches workers got directly."""
    return stack.metrics().value("millstream_batches_direct_total")


def body(x: int) -> tuple[bytes, dict[str, str]]:
    return v2.request({"x": np.array([[x]], np.int64)}, parameters=PATIENT)


def over_http(stack: Stack) -> Callable[[], object]:
    return stack.send(PATH, *body(ENDLESS)).close


def over_asgi(stack: Stack) -> Callable[[], object]:
    text = json.dumps({"instances": [[ENDLESS]]}).encode()
    return stack.send("/v1/models/slow:predict", text, {"Content-Type": "application/json"}).close


def over_grpc(stack: Stack) -> Callable[[], object]:
    message = pb.ModelInferRequest(model_name="slow", raw_input_contents=[np.array([ENDLESS], "<i8").tobytes()])
    message.inputs.add(name="x", datatype="INT64", shape=[1, 1])
    channel = grpc.insecure_channel(stack.grpc)
    method = "/inference.GRPCInferenceService/ModelInfer"
    call = channel.unary_unary(method).future(message.SerializeToString(), timeout=500)

    def leave() -> None:
        call.cancel()
        channel.close()

    return leave


@pytest.mark.parametrize("call", [over_http, over_asgi, over_grpc])
def test_the_run_ends_and_the_next_caller_is_answered(
    served: Stack, call: Callable[[Stack], Callable[[], object]]
) -> None:
    before = served.metrics().value(TERMINATED, model="slow")
    before_directly = directly(served)
    leave = call(served)
    wait_until(lambda: runs_now(served) or directly(served) > before_directly, what="the run begins")
    message, headers = body(1)
    with httpx2.Client(base_url=served.url, timeout=500, trust_env=False) as client:
        assert client.get("/v2/health/live").status_code == 200
        leave()
        reply = client.post(PATH, content=message, headers=headers)
    assert reply.status_code == 200
    assert v2.outputs(reply.content, dict(reply.headers))["y"].tolist() == [[1]]
    wait_until(lambda: served.metrics().value(TERMINATED, model="slow") == before + 1, what="one run was terminated")
    assert served.metrics().value("millstream_requests_quarantined") == 0
