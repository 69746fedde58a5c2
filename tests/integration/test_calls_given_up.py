"""A client that gives up its call frees no call of its key while the run goes on: over each way to run a model."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import httpx2
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from millstream.services.wire.batch import decode_batch
from tests.kit import models
from tests.kit.stack import CALL_S_MAX, Stack, assert_quiet, running_stack, sigstopped
from tests.kit.wait import wait_until

#: batches take the queue, in which a test sees them
SETTINGS = {"admin_key": "admin", "queue_lease_s": 600, "queue_direct": False}
CALLS = 20  # by which the gateway has noticed that a client is gone
ROW = np.ones((1, 128), np.float32)
SLOW = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 128], "data": ROW.tolist()}]}).encode()
_SERVICE = "/inference.GRPCInferenceService/"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, str]]:
    """A stack, and a key that may make one call at a time."""
    folder = tmp_path_factory.mktemp("given-up")
    with running_stack(folder, settings=SETTINGS) as stack:
        stack.push("slow", models.slow(folder / "slow.onnx"))
        limits = {"name": "alone", "scopes": ["infer:*"], "limits": {"concurrency": 1}}
        key = stack.http.post("/admin/v1/keys", json=limits).json()["key"]
        yield stack, key
        assert_quiet(stack)


def runs_now(stack: Stack) -> bool:
    """Whether a batch that is no readiness probe has left the gateway and is not answered."""
    redis: Any = stack.redis
    for key in redis.scan_iter("ms:*:stream:*"):
        if any(not decode_batch(fields[b"e"])[0].probe for _, fields in redis.xrange(key)):
            return True
    return False


def check(stack: Stack, key: str, call: Callable[[], Callable[[], None]]) -> None:
    """Check that no call is let in while the run of another lasts. `call` begins it, and returns what gives it up."""
    headers = {"Authorization": f"Bearer {key}"}
    with httpx2.Client(base_url=stack.url, headers=headers, timeout=CALL_S_MAX, trust_env=False) as client:

        def status() -> int:
            return client.get("/v2/models/slow").status_code  # counts as a call, and waits for no run

        with sigstopped(stack.pids()["cpu-0"]):
            give_up = call()
            wait_until(lambda: runs_now(stack), what="the run has begun")
            assert status() == 429
            give_up()
            assert [status() for _ in range(CALLS)] == [429] * CALLS
        assert wait_until(lambda: (code := status()) != 429 and code, what="the key may call again") == 200
        wait_until(lambda: not runs_now(stack), what="the batch is removed, a moment after its reply")


@pytest.mark.parametrize("path", ["/v2/models/slow/infer", "/v1/models/slow:predict"])
def test_a_client_that_disconnects(served: tuple[Stack, str], path: str) -> None:
    stack, key = served
    body = SLOW if path.startswith("/v2") else json.dumps({"instances": ROW.tolist()}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    check(stack, key, lambda: stack.send(path, body, headers).close)


def message() -> bytes:
    request = pb.ModelInferRequest(model_name="slow")
    request.inputs.add(name="x", datatype="FP32", shape=[1, 128]).contents.fp32_contents.extend([1.0] * 128)
    data: bytes = request.SerializeToString()
    return data


def test_a_call_of_grpc_that_is_cancelled(served: tuple[Stack, str]) -> None:
    stack, key = served
    metadata = (("authorization", f"Bearer {key}"),)
    with grpc.insecure_channel(stack.grpc) as channel:
        infer = channel.unary_unary(f"{_SERVICE}ModelInfer")
        check(stack, key, lambda: infer.future(message(), metadata=metadata).cancel)


def test_a_stream_that_is_cancelled(served: tuple[Stack, str]) -> None:
    stack, key = served
    metadata = (("authorization", f"Bearer {key}"),)
    with grpc.insecure_channel(stack.grpc) as channel:
        stream = channel.stream_stream(f"{_SERVICE}ModelStreamInfer")
        check(stack, key, lambda: stream(iter([message()]), metadata=metadata).cancel)
