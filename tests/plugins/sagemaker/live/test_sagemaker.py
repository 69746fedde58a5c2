"""SageMaker's calls with boto3 as it is, and as a container is called; answers are held to ONNX Runtime's own."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import onnxruntime
import pytest
from botocore.exceptions import ClientError

from tests.kit import models
from tests.kit.sagemaker import runtime_client
from tests.kit.stack import Stack, assert_quiet, running_stack
from tests.kit.wait import wait_until

ROWS = np.random.default_rng(11).standard_normal((2, 64)).astype(np.float32)
PREFIX = "application/vnd.sagemaker-triton.binary+json;json-header-size="


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stack, np.ndarray[Any, Any]]]:
    folder = tmp_path_factory.mktemp("sagemaker")
    with running_stack(folder, settings={"request_bytes_max": 1 << 20}) as stack:
        none = stack.http.post("/invocations", json={"instances": [1]})
        assert (none.status_code, none.json()) == (404, {"error": "there is no model yet: upload one"})
        path = models.mlp(folder / "mlp.onnx")
        stack.push("sm-mlp", path)
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        expected = session.run(None, {"input": ROWS})[0]
        only = stack.http.post("/invocations", json=ROWS.tolist())
        np.testing.assert_allclose(only.json()["predictions"], expected, rtol=1e-5)
        stack.push("sm-add", models.add_sub(folder / "add.onnx"))
        stack.push("sm-scale", models.scale(folder / "two.onnx", 2.0), version=1)
        stack.push("sm-scale", models.scale(folder / "three.onnx", 3.0), version=2)
        stack.push("sm-lookup", models.failing(folder / "lookup.onnx"))
        yield stack, expected


@pytest.fixture
def stack(served: tuple[Stack, np.ndarray[Any, Any]]) -> Iterator[Stack]:
    yield served[0]
    assert_quiet(served[0])


@pytest.fixture
def expected(served: tuple[Stack, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return served[1]


@pytest.fixture
def runtime(stack: Stack) -> Any:
    return runtime_client(stack)


def npy(array: np.ndarray[Any, Any]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def v2_json() -> bytes:
    tensor = {"name": "input", "shape": [2, 64], "datatype": "FP32", "data": ROWS.reshape(-1).tolist()}
    return json.dumps({"inputs": [tensor]}).encode()


def v2_binary() -> tuple[bytes, int]:
    tensor = {"name": "input", "shape": [2, 64], "datatype": "FP32", "parameters": {"binary_data_size": ROWS.nbytes}}
    head = json.dumps({"parameters": {"binary_data_output": True}, "inputs": [tensor]}).encode()
    return head + ROWS.tobytes(), len(head)


def csv(array: np.ndarray[Any, Any]) -> bytes:
    return "\n".join(",".join(map(str, row)) for row in array.tolist()).encode()


def numbers(content_type: str, body: bytes) -> np.ndarray[Any, Any]:
    """What a reply of any form says, as the model's output."""
    if content_type == "application/x-npy":
        return np.asarray(np.load(io.BytesIO(body)))
    if content_type == "text/csv":
        return np.loadtxt(io.BytesIO(body), delimiter=",", ndmin=2)
    if content_type.startswith(PREFIX):
        return np.frombuffer(body[int(content_type.removeprefix(PREFIX)) :], np.float32).reshape(2, 10)
    document = json.loads(body)
    if "outputs" in document and isinstance(document["outputs"][0], dict):
        return np.array(document["outputs"][0]["data"]).reshape(document["outputs"][0]["shape"])
    return np.array(document.get("predictions", document.get("outputs")))


REQUESTS = {
    "instances": ("application/json", json.dumps({"instances": ROWS.tolist()}).encode()),
    "columns": ("application/json", json.dumps({"inputs": {"input": ROWS.tolist()}}).encode()),
    "list": ("application/json", json.dumps(ROWS.tolist()).encode()),
    "csv": ("text/csv", csv(ROWS)),
    "npy": ("application/x-npy", npy(ROWS)),
    "npy-of-doubles": ("application/x-npy", npy(ROWS.astype(np.float64))),
}


@pytest.mark.parametrize("accept", [None, "application/json", "text/csv", "application/x-npy"])
@pytest.mark.parametrize("form", REQUESTS)
def test_boto3_in_every_form(runtime: Any, expected: np.ndarray[Any, Any], form: str, accept: str | None) -> None:
    content_type, body = REQUESTS[form]
    options = {} if accept is None else {"Accept": accept}
    reply = runtime.invoke_endpoint(EndpointName="sm-mlp", ContentType=content_type, Body=body, **options)
    assert reply["ContentType"] == (accept or "application/json")
    np.testing.assert_allclose(numbers(reply["ContentType"], reply["Body"].read()), expected, rtol=1e-5)


def test_boto3_with_v2_and_tritons_binary_type(runtime: Any, expected: np.ndarray[Any, Any]) -> None:
    reply = runtime.invoke_endpoint(EndpointName="sm-mlp", ContentType="application/json", Body=v2_json())
    np.testing.assert_allclose(numbers(reply["ContentType"], reply["Body"].read()), expected, rtol=1e-5)
    body, length = v2_binary()
    reply = runtime.invoke_endpoint(EndpointName="sm-mlp", ContentType=f"{PREFIX}{length}", Body=body)
    assert reply["ContentType"].startswith(PREFIX)
    np.testing.assert_allclose(numbers(reply["ContentType"], reply["Body"].read()), expected, rtol=1e-5)


def test_boto3_names_models_and_versions(runtime: Any) -> None:
    def ask(**options: Any) -> tuple[Any, str]:
        reply = runtime.invoke_endpoint(ContentType="application/json", Body=b"[[1, 2]]", **options)
        return json.loads(reply["Body"].read())["predictions"], reply["InvokedProductionVariant"]

    assert ask(EndpointName="sm-scale") == ([[3.0, 6.0]], "2")
    assert ask(EndpointName="sm-scale", TargetVariant="1") == ([[2.0, 4.0]], "1")
    assert ask(EndpointName="any", TargetModel="sm-scale.tar.gz") == ([[3.0, 6.0]], "2")
    assert ask(EndpointName="any", InferenceComponentName="sm-scale") == ([[3.0, 6.0]], "2")
    reply = runtime.invoke_endpoint(
        EndpointName="sm-scale",
        ContentType="application/json",
        Body=b"[[1, 2]]",
        CustomAttributes="c000b4f9-df62-4c85",
        InferenceId="mine-7",
    )
    assert reply["CustomAttributes"] == "c000b4f9-df62-4c85"
    assert reply["ResponseMetadata"]["HTTPHeaders"]["x-amzn-sagemaker-inference-id"] == "mine-7"


def test_boto3_reads_a_stream(runtime: Any, expected: np.ndarray[Any, Any]) -> None:
    content_type, body = REQUESTS["csv"]
    reply = runtime.invoke_endpoint_with_response_stream(
        EndpointName="sm-mlp", ContentType=content_type, Body=body, Accept="text/csv"
    )
    assert reply["ContentType"] == "text/csv"
    parts = [event["PayloadPart"]["Bytes"] for event in reply["Body"]]
    np.testing.assert_allclose(numbers("text/csv", b"".join(parts)), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "status", "code", "text"),
    [
        ({"EndpointName": "nope", "Body": b"[1]"}, 400, "ValidationError", "Request for unknown model: 'nope'"),
        ({"EndpointName": "sm-scale", "TargetVariant": "9", "Body": b"[1]"}, 400, "ValidationError", "version 9"),
        (
            {"EndpointName": "sm-scale", "TargetVariant": "blue", "Body": b"[1]"},
            400,
            "ValidationError",
            "is no version",
        ),
        ({"EndpointName": "sm-scale", "Body": b"[[1]]"}, 424, "ModelError", "Expected [-1,2]"),
        ({"EndpointName": "sm-scale", "Body": b"["}, 424, "ModelError", "failed to parse"),
        ({"EndpointName": "sm-scale", "Body": b"3"}, 424, "ModelError", "or a list of instances"),
        ({"EndpointName": "sm-scale", "Body": b" " * (1 << 21)}, 413, "ValidationError", "larger than the limit"),
        ({"EndpointName": "sm-scale", "Body": b"x", "ContentType": "image/png"}, 424, "ModelError", "'image/png'"),
        ({"EndpointName": "sm-scale", "Body": b"[[1,2]]", "Accept": "image/png"}, 424, "ModelError", "Accept"),
        ({"EndpointName": "sm-add", "Body": b"1", "ContentType": "text/csv"}, 424, "ModelError", "one input"),
        (
            {"EndpointName": "sm-scale", "Body": b"{}", "ContentType": f"{PREFIX}x"},
            424,
            "ModelError",
            "header-size",
        ),
        ({"EndpointName": "sm-scale", "Body": b"{}", "ContentType": f"{PREFIX}9"}, 424, "ModelError", "range"),
        ({"EndpointName": "sm-scale", "Body": b'{"inputs": []}'}, 424, "ModelError", "expected 1 inputs but got 0"),
        ({"EndpointName": "sm-lookup", "Body": b"[[99]]"}, 424, "ModelError", "Integer division by zero"),
    ],
)
def test_errors_as_boto3_reads_them(runtime: Any, options: Any, status: int, code: str, text: str) -> None:
    for call in (runtime.invoke_endpoint, runtime.invoke_endpoint_with_response_stream):
        with pytest.raises(ClientError) as refusal:
            call(**{"ContentType": "application/json", **options})
        reply = refusal.value.response
        assert reply["ResponseMetadata"]["HTTPStatusCode"] == status
        assert reply["Error"]["Code"] == code
        assert text in reply["Error"]["Message"]
    if code == "ModelError":
        with pytest.raises(runtime.exceptions.ModelError) as refusal:
            runtime.invoke_endpoint(**{"ContentType": "application/json", **options})
        original = 500 if "division" in text else 406 if text == "Accept" else 400
        assert refusal.value.response["OriginalStatusCode"] == original


def test_what_is_not_offered_is_said(runtime: Any) -> None:
    with pytest.raises(ClientError, match="asynchronous invocations are not supported") as refusal:
        runtime.invoke_endpoint_async(EndpointName="sm-mlp", InputLocation="s3://bucket/key")
    assert refusal.value.response["ResponseMetadata"]["HTTPStatusCode"] == 501


def container(stack: Stack, body: bytes, **headers: str) -> httpx2.Response:
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return stack.http.post("/invocations", content=body, headers={"Content-Type": "application/json", **names})


def test_a_container(stack: Stack, expected: np.ndarray[Any, Any]) -> None:

    def healthy() -> bool:
        ping = stack.http.get("/ping")
        return (ping.status_code, ping.json()) == (200, {"status": "Healthy"})

    wait_until(healthy, what="probes are answered")
    reply = container(stack, b"[[1, 2]]", X_Amzn_SageMaker_Target_Model="sm-scale")
    assert reply.json() == {"predictions": [[3.0, 6.0]]}
    reply = container(stack, b"[[1, 2]]")
    assert reply.status_code == 400
    assert "set MILLSTREAM_SAGEMAKER_MODEL" in reply.json()["error"]
    body, length = v2_binary()
    reply = container(
        stack,
        body,
        X_Amzn_SageMaker_Target_Model="sm-mlp",
        Content_Type="application/octet-stream",
        Inference_Header_Content_Length=str(length),
    )
    assert reply.headers["content-type"] == "application/octet-stream"
    head = int(reply.headers["inference-header-content-length"])
    np.testing.assert_allclose(np.frombuffer(reply.content[head:], np.float32).reshape(2, 10), expected, rtol=1e-5)
    assert (
        container(stack, b"[[1, 2]]", X_Amzn_SageMaker_Target_Model="sm-scale", Accept="image/png").status_code == 406
    )
    assert stack.http.get("/invocations").status_code == 405


def test_json_that_asks_for_binary_outputs_says_where_they_begin(
    stack: Stack, runtime: Any, expected: np.ndarray[Any, Any]
) -> None:
    document = json.loads(v2_json())
    for asks in (
        {"parameters": {"binary_data_output": True}},
        {"outputs": [{"name": "output", "parameters": {"binary_data": True}}]},
    ):
        body = json.dumps({**document, **asks}).encode()
        reply = runtime.invoke_endpoint(EndpointName="sm-mlp", ContentType="application/json", Body=body)
        assert reply["ContentType"].startswith(PREFIX)
        np.testing.assert_allclose(numbers(reply["ContentType"], reply["Body"].read()), expected, rtol=1e-5)
        got = container(stack, body, X_Amzn_SageMaker_Target_Model="sm-mlp")
        np.testing.assert_allclose(numbers(got.headers["content-type"], got.content), expected, rtol=1e-5)
        stream = runtime.invoke_endpoint_with_response_stream(
            EndpointName="sm-mlp", ContentType="application/json", Body=body
        )
        parts = b"".join(event["PayloadPart"]["Bytes"] for event in stream["Body"])
        np.testing.assert_allclose(numbers(stream["ContentType"], parts), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "headers", "text"),
    [
        (b'{"inputs": []}', {}, "expected 1 inputs but got 0 inputs"),
        (b"x", {"Content-Type": "image/png"}, "'image/png'"),
        (b"[[1,2]]", {"Content-Encoding": "br"}, "Unsupported compression"),
        (b"{}", {"Content-Type": f"{PREFIX}-1"}, "header-size"),
        (b"{}", {"Content-Type": f"{PREFIX}3"}, "in range"),
        (b"{}", {"Content-Type": f"{PREFIX}4294967296"}, "in range"),
        (b"{}", {"Content-Type": PREFIX}, "header-size"),
        (b"{}", {"Content-Type": f"text/plain; {PREFIX}2"}, "is not taken"),
    ],
)
def test_a_container_refuses_bodies_with_400(stack: Stack, body: bytes, headers: dict[str, str], text: str) -> None:
    names = {name.replace("-", "_"): value for name, value in headers.items()}
    reply = container(stack, body, X_Amzn_SageMaker_Target_Model="sm-scale", **names)
    assert reply.status_code == 400, reply.text
    assert text in reply.json()["error"]


def test_the_model_may_be_configured(tmp_path: Path) -> None:
    settings = {"sagemaker_model": "sm-two"}
    paths = {
        f"sm-{name}": models.scale(tmp_path / f"{name}.onnx", factor) for name, factor in (("two", 2.0), ("three", 3.0))
    }
    with running_stack(tmp_path, settings=settings, models=paths) as stack:
        assert container(stack, b"[[1, 2]]").json() == {"predictions": [[2.0, 4.0]]}
