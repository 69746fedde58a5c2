"""Requests with more rows than a run takes: every protocol answers all rows, in order, as one request."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator
from typing import Any

import httpx2
import numpy as np
import pytest
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm

from tests.kit import models, v2
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.wait import wait_until

ROWS = 1003  # parts of 64 rows, and a smaller one
X = np.random.default_rng(1).standard_normal((ROWS, 2)).astype(np.float32)
TEXTS = np.array([[f"text {row}".encode(), b"\0" * (row % 5)] for row in range(ROWS)], np.object_)
SETTINGS = {
    "shm_allow_clients": True,
    "open_control": True,
    "access_log": "file",
    "server_timing": True,
}


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("parts")
    with running_stack(folder, settings=SETTINGS) as stack:
        stack.push("scale", models.scale(folder / "scale.onnx"))
        stack.push("add", models.add_sub(folder / "add.onnx"))
        stack.push("text", models.identity(folder / "text.onnx", datatype="BYTES"))
        stack.push("limited", models.scale(folder / "limited.onnx"))
        reply = stack.http.post(
            "/v2/repository/models/limited/load", json={"parameters": {"config": '{"max_batch_size": 8}'}}
        )
        assert reply.status_code == 200, reply.text
        yield stack


@pytest.fixture
def stack(one: Stack) -> Iterator[Stack]:
    yield one
    assert_quiet(one)


def good(reply: httpx2.Response) -> httpx2.Response:
    assert reply.status_code == 200, reply.text[:500]
    return reply


def statistics(stack: Stack, model: str) -> tuple[int, int]:
    """Return the requests that were answered, and their rows."""
    found = stack.http.get(f"/v2/models/{model}/stats").json()["model_stats"][0]
    return found["inference_stats"]["success"]["count"], found["inference_count"]


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
@pytest.mark.parametrize("encoding", [None, "gzip"])
def test_v2(stack: Stack, binary: bool, encoding: str | None) -> None:
    body, headers = v2.request({"x": X}, binary=binary, binary_outputs=binary, id="mine")
    if encoding:
        body, headers = gzip.compress(body), headers | {"Content-Encoding": encoding}
    reply = good(stack.http.post("/v2/models/scale/infer", content=body, headers=headers))
    assert np.array_equal(v2.outputs(reply.content, reply.headers)["y"], 2 * X)
    assert "run;dur=" in reply.headers["server-timing"]


def test_numbers_that_are_none_stay_in_their_rows(stack: Stack) -> None:
    x = X.copy()
    x[::7, 1], x[5, 0] = np.nan, np.inf
    body, headers = v2.request({"x": x})
    reply = good(stack.http.post("/v2/models/scale/infer", content=body, headers=headers))
    assert np.array_equal(v2.outputs(reply.content, reply.headers)["y"], 2 * x, equal_nan=True)


@pytest.mark.parametrize("kind", [triton_http, triton_grpc], ids=["http", "grpc"])
def test_texts_several_inputs_and_chosen_outputs_with_triton_clients(stack: Stack, kind: Any) -> None:
    where = stack.url.removeprefix("http://") if kind is triton_http else stack.grpc
    with kind.InferenceServerClient(where) as client:
        text = kind.InferInput("x", list(TEXTS.shape), "BYTES")
        text.set_data_from_numpy(TEXTS)
        assert np.array_equal(client.infer("text", [text]).as_numpy("y"), TEXTS)
        a, b = np.tile(X, 2), np.tile(-3 * X, 2)
        inputs = [kind.InferInput(name, list(a.shape), "FP32") for name in ("a", "b")]
        for given, array in zip(inputs, (a, b), strict=True):
            given.set_data_from_numpy(array)
        only = client.infer("add", inputs, outputs=[kind.InferRequestedOutput("difference")])
        assert np.array_equal(only.as_numpy("difference"), a - b)
        assert only.as_numpy("sum") is None
        classes = client.infer("add", inputs, outputs=[kind.InferRequestedOutput("sum", class_count=1)])
        best = [int(one.split(b":")[1]) for one in classes.as_numpy("sum").ravel()]
        assert best == np.argmax(a + b, axis=1).tolist()


@pytest.mark.parametrize("kind", [triton_http, triton_grpc], ids=["http", "grpc"])
def test_shared_memory_of_clients(stack: Stack, kind: Any) -> None:
    where = stack.url.removeprefix("http://") if kind is triton_http else stack.grpc
    key = f"/test-rows-in-parts-{os.getpid()}-{kind.__name__}"
    handle = shm.create_shared_memory_region("region", key, 2 * X.nbytes)
    with kind.InferenceServerClient(where) as client:
        try:
            client.register_system_shared_memory("region", key, 2 * X.nbytes)
            shm.set_shared_memory_region(handle, [X])
            given = kind.InferInput("x", list(X.shape), "FP32")
            given.set_shared_memory("region", X.nbytes)
            wanted = kind.InferRequestedOutput("y")
            wanted.set_shared_memory("region", X.nbytes, X.nbytes)
            client.infer("scale", [given], outputs=[wanted])
            found = shm.get_contents_as_numpy(handle, np.float32, list(X.shape), X.nbytes)
            assert np.array_equal(found, 2 * X)
        finally:
            client.unregister_system_shared_memory("region")
            shm.destroy_shared_memory_region(handle)


def test_grpc_stream(stack: Stack) -> None:
    answers: list[Any] = []
    with triton_grpc.InferenceServerClient(stack.grpc) as client:
        client.start_stream(lambda result, error: answers.append(error or result.as_numpy("y")))
        for sign in (1, -1):
            given = triton_grpc.InferInput("x", list(X.shape), "FP32")
            given.set_data_from_numpy(sign * X)
            client.async_stream_infer("scale", [given])
        wait_until(lambda: len(answers) == 2, what="both answers")
        client.stop_stream()
    assert [np.array_equal(found, sign * 2 * X) for found, sign in zip(answers, (1, -1), strict=True)] == [True, True]


@pytest.mark.parametrize(
    ("path", "body", "member"),
    [
        ("/v1/models/scale:predict", {"instances": X.tolist()}, "predictions"),
        ("/v1/models/scale:predict", {"inputs": {"x": X.tolist()}}, "outputs"),
        ("/endpoints/scale/invocations", {"instances": X.tolist()}, "predictions"),
        ("/predictions/scale", X.tolist(), None),
    ],
)
def test_protocols_of_rows(stack: Stack, path: str, body: Any, member: str | None) -> None:
    found = good(stack.http.post(path, json=body)).json()
    assert np.array_equal(np.array(found[member] if member else found, np.float32), 2 * X)


def test_a_csv_of_a_sagemaker_client(stack: Stack) -> None:
    lines = "\n".join(f"{a!r},{b!r}" for a, b in X.tolist())
    headers = {"Content-Type": "text/csv", "Accept": "text/csv"}
    reply = good(stack.http.post("/endpoints/scale/invocations", content=lines, headers=headers))
    assert np.array_equal(np.array([line.split(",") for line in reply.text.split()], np.float32), 2 * X)


def test_it_counts_as_one_request(stack: Stack) -> None:
    def counted() -> tuple[int, float, int]:
        requests, rows = statistics(stack, "scale")
        return requests, stack.metrics().value("millstream_requests_total", model="scale", outcome="ok"), rows

    before = counted()
    body, headers = v2.request({"x": X})
    good(stack.http.post("/v2/models/scale/infer", content=body, headers=headers | {"X-Request-Id": "in-parts"}))
    after = counted()
    assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1, ROWS]
    logs = list((stack.home / "logs").glob("*access*"))

    def logged() -> list[str]:
        return [line for path in logs for line in path.read_text().splitlines() if "in-parts" in line]

    assert [f"scale:1 rows {ROWS}" in line for line in wait_until(logged)] == [True]


def test_what_has_more_rows_than_a_request_may_have(stack: Stack) -> None:
    refusals = []
    for model, rows in (("scale", 1_000_001), ("limited", 9)):
        body, headers = v2.request({"x": np.zeros((rows, 2), np.float32)})
        reply = stack.http.post(f"/v2/models/{model}/infer", content=body, headers=headers)
        refusals.append((reply.status_code, reply.json()["error"]))
    assert refusals == [
        (400, "inference request batch-size must be <= 1000000 for 'scale'"),
        (400, "inference request batch-size must be <= 8 for 'limited'"),
    ]
