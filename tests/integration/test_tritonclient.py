"""The clients that people have: tritonclient.http and its asyncio form against the running product, unchanged."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from tritonclient.utils import InferenceServerException

from tests.kit import models
from tests.kit.blocking import Blocking
from tests.kit.stack import Stack
from tests.kit.wait import wait_until

A = np.arange(8, dtype=np.float32).reshape(2, 4)
B = A * 10 + 1


@pytest.fixture(scope="module", autouse=True)
def _served(shared_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("models") / "m.onnx"
    push = shared_stack.push
    push("tc-add", models.add_sub(path), version=3)
    push("tc-add", models.add_sub(path), version=4, activate=False)
    push("tc-text", models.identity(path, datatype="BYTES"))
    push("tc-fp16", models.identity(path, datatype="FP16"))
    push("tc-bf16", models.identity(path, datatype="BF16"))
    push("tc-wide", models.identity(path, shape=("N", 1024)))
    push("tc-lookup", models.failing(path))


@pytest.fixture(params=["sync", "aio"])
def client(request: pytest.FixtureRequest, stack: Stack) -> Iterator[Any]:
    host = stack.url.removeprefix("http://")
    if request.param == "sync":
        with triton.InferenceServerClient(host) as client:
            yield client
        return
    with asyncio.Runner() as runner:

        async def connect() -> Any:
            return triton_aio.InferenceServerClient(host)

        client = Blocking(runner.run(connect()), runner)
        yield client
        client.close()


def tensor(name: str, array: Any, datatype: str = "FP32", *, binary: bool = True) -> Any:
    made = triton.InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def pair(*binary: bool) -> list[Any]:
    return [tensor("a", A, binary=binary[0]), tensor("b", B, binary=binary[1])]


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    # A busy machine may hold up the probes of one.
    wait_until(client.is_server_ready, what="the server is ready")
    for version in ("", "4"):
        wait_until(partial(client.is_model_ready, "tc-add", version), what="the model is ready")
    assert not client.is_model_ready("tc-nothing")
    assert not client.is_model_ready("tc-add", "5")
    server = client.get_server_metadata()
    assert server["name"]
    assert "binary_tensor_data" in server["extensions"]
    model = client.get_model_metadata("tc-add")
    assert model["name"] == "tc-add"
    assert model["versions"] == ["3", "4"]
    assert model["platform"] == "onnxruntime_onnx"
    assert model["inputs"] == [{"name": name, "datatype": "FP32", "shape": [-1, 4]} for name in ("a", "b")]
    assert [output["name"] for output in model["outputs"]] == ["sum", "difference"]


@pytest.mark.parametrize("binary", [(True, True), (False, False), (True, False), (False, True)])
def test_inputs_as_json_binary_and_mixed(client: Any, binary: tuple[bool, bool]) -> None:
    result = client.infer("tc-add", pair(*binary))
    np.testing.assert_array_equal(result.as_numpy("sum"), A + B)
    np.testing.assert_array_equal(result.as_numpy("difference"), A - B)
    assert result.get_response()["model_version"] == "3"


def test_requested_outputs(client: Any) -> None:
    outputs = [
        triton.InferRequestedOutput("difference", binary_data=False),
        triton.InferRequestedOutput("sum", binary_data=True),
    ]
    result = client.infer("tc-add", pair(True, True), outputs=outputs)
    shown = result.get_response()["outputs"]
    assert [output["name"] for output in shown] == ["difference", "sum"]
    assert "data" in shown[0]
    assert "data" not in shown[1]
    np.testing.assert_array_equal(result.as_numpy("sum"), A + B)
    np.testing.assert_array_equal(result.as_numpy("difference"), A - B)
    only = client.infer("tc-add", pair(True, True), outputs=outputs[:1])
    assert only.as_numpy("sum") is None
    np.testing.assert_array_equal(only.as_numpy("difference"), A - B)


def test_ids_versions_and_parameters(client: Any) -> None:
    result = client.infer(
        "tc-add", pair(True, True), model_version="4", request_id="müller 7", priority=1, parameters={"mine": "yes"}
    )
    assert result.get_response()["id"] == "müller 7"
    assert result.get_response()["model_version"] == "4"
    assert "id" not in client.infer("tc-add", pair(True, True)).get_response()


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compression_both_ways(client: Any, stack: Stack, algorithm: str) -> None:
    x = np.arange(8 * 1024, dtype=np.float32).reshape(8, 1024)
    result = client.infer(
        "tc-wide",
        [tensor("x", x)],
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    np.testing.assert_array_equal(result.as_numpy("y"), x)
    # that it was: the client does not tell
    body, length = triton.InferenceServerClient.generate_request_body([tensor("x", x)])
    headers = {"Inference-Header-Content-Length": str(length), "Accept-Encoding": algorithm}
    reply = stack.http.post("/v2/models/tc-wide/infer", content=bytes(body), headers=headers)
    assert reply.headers["content-encoding"] == algorithm
    assert int(reply.headers["content-length"]) < len(reply.content)
    parsed = triton.InferenceServerClient.parse_response_body(
        reply.content, header_length=int(reply.headers["inference-header-content-length"])
    )
    np.testing.assert_array_equal(parsed.as_numpy("y"), x)


@pytest.mark.parametrize("binary", [True, False])
def test_text(client: Any, binary: bool) -> None:
    x = np.array([["", "plain"], ["é\u20ac\U0001f600", "x" * 1000]], object)
    outputs = [triton.InferRequestedOutput("y", binary_data=binary)]
    result = client.infer("tc-text", [tensor("x", x, "BYTES", binary=binary)], outputs=outputs)
    got = [item.decode() if isinstance(item, bytes) else item for item in result.as_numpy("y").ravel()]
    assert got == x.ravel().tolist()


def test_half_precision(client: Any) -> None:
    x = np.array([[1.5, -2.0], [np.inf, 65504]], np.float16)
    np.testing.assert_array_equal(client.infer("tc-fp16", [tensor("x", x, "FP16")]).as_numpy("y"), x)
    wide = np.array([[1.5, -2.0], [np.inf, 2.0**100]], ml_dtypes.bfloat16)
    got = client.infer("tc-bf16", [tensor("x", wide, "BF16")]).as_numpy("y")
    np.testing.assert_array_equal(got.astype(np.float32), wide.astype(np.float32))


def test_half_precision_has_no_json_form(client: Any) -> None:
    x = np.ones((1, 2), np.float16)
    with pytest.raises(InferenceServerException, match="sending FP16 data via JSON is not supported"):
        client.infer("tc-fp16", [tensor("x", x, "FP16")], outputs=[triton.InferRequestedOutput("y", binary_data=False)])


def test_a_timeout_that_passes(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="deadline") as caught:
        client.infer("tc-add", pair(True, True), timeout=1)
    assert caught.value.status() == "504"
    np.testing.assert_array_equal(client.infer("tc-add", pair(True, True), timeout=60_000_000).as_numpy("sum"), A + B)


@pytest.mark.parametrize(
    ("model", "version", "inputs", "status", "message"),
    [
        ("tc-nothing", "", pair(True, True), "404", "Request for unknown model: 'tc-nothing' is not found"),
        ("tc-add", "9", pair(True, True), "404", "Request for unknown model: 'tc-add' version 9 is not found"),
        ("tc-add", "", pair(True, True)[:1], "400", r"missing required input\(s\) \['b'\]"),
        ("tc-add", "", [*pair(True, True), tensor("c", A)], "400", "unexpected inference input 'c'"),
        ("tc-add", "", [tensor("a", A[:, :3]), tensor("b", B)], "400", "unexpected shape for input 'a'"),
        ("tc-add", "", [tensor("a", A), tensor("b", B[:1])], "400", "batch size does not match"),
        (
            "tc-add",
            "",
            [tensor("a", A.astype(np.float64), "FP64"), tensor("b", B)],
            "400",
            "inference input 'a' data-type is 'FP64', but model 'tc-add' expects 'FP32'",
        ),
        ("tc-lookup", "", [tensor("index", np.array([[99]]), "INT64")], "500", "Integer division by zero"),
    ],
)
def test_errors(client: Any, model: str, version: str, inputs: list[Any], status: str, message: str) -> None:
    with pytest.raises(InferenceServerException, match=message) as caught:
        client.infer(model, inputs, model_version=version)
    assert caught.value.status() == status


def test_what_is_not_offered_says_so(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="sequences are not supported"):
        client.infer("tc-add", pair(True, True), sequence_id=7, sequence_start=True)


def test_unknown_outputs(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="unexpected inference output 'zz' for model 'tc-add'"):
        client.infer("tc-add", pair(True, True), outputs=[triton.InferRequestedOutput("zz")])


def test_async_infer(stack: Stack) -> None:
    with triton.InferenceServerClient(stack.url.removeprefix("http://"), concurrency=8) as client:
        sent = [
            (i, client.async_infer("tc-add", [tensor("a", A + i), tensor("b", B)], request_id=str(i)))
            for i in range(100)
        ]
        for i, request in sent:
            result = request.get_result()
            assert result.get_response()["id"] == str(i)
            np.testing.assert_array_equal(result.as_numpy("sum"), A + i + B)
        failing = client.async_infer("tc-nothing", pair(True, True))
        with pytest.raises(InferenceServerException, match="is not found"):
            failing.get_result()


def test_many_at_once_with_asyncio(stack: Stack) -> None:
    async def call_all() -> list[Any]:
        async with triton_aio.InferenceServerClient(stack.url.removeprefix("http://"), conn_limit=16) as client:
            return await asyncio.gather(
                *(client.infer("tc-add", [tensor("a", A + i), tensor("b", B)]) for i in range(200))
            )

    for i, result in enumerate(asyncio.run(call_all())):
        np.testing.assert_array_equal(result.as_numpy("sum"), A + i + B)


def test_clients_in_threads(stack: Stack) -> None:
    def call(i: int) -> Any:
        with triton.InferenceServerClient(stack.url.removeprefix("http://")) as client:
            return client.infer("tc-add", [tensor("a", A + i), tensor("b", B)]).as_numpy("sum")

    with ThreadPoolExecutor(8) as threads:
        for i, got in enumerate(threads.map(call, range(40))):
            np.testing.assert_array_equal(got, A + i + B)
