"""A request that does not fit its model: the refusal has the signature and a request that works, which is then sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import httpx2
import openai
import pytest
import tritonclient.grpc as tc_grpc
import tritonclient.http as tc_http
from botocore.exceptions import ClientError
from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.kit import models
from tests.kit.sagemaker import runtime_client
from tests.kit.stack import Stack, running_stack

#: the smallest of them have one input; "image" is too large to be printed, "windowed" does not run at size 1
MODELS = ("mlp", "pair", "text", "flags", "half", "image", "windowed", "length", "fixed", "bytes-pair", "scalar", "ids")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("signatures")
    with running_stack(folder) as stack:
        for name, path in {
            "mlp": models.mlp(folder / "mlp.onnx"),
            "pair": models.add_sub(folder / "pair.onnx"),
            "text": models.identity(folder / "text.onnx", "BYTES"),
            "flags": models.identity(folder / "flags.onnx", "BOOL"),
            "half": models.identity(folder / "half.onnx", "FP16"),
            "image": models.identity(folder / "image.onnx", "FP32", ("N", 3, 224, 224)),
            "windowed": models.windowed(folder / "windowed.onnx"),
            "length": models.variable_length(folder / "length.onnx"),
            "fixed": models.transpose(folder / "fixed.onnx"),
            "bytes-pair": models.identities(folder / "bytes-pair.onnx", ("BYTES", "UINT8")),
            "scalar": models.identity(folder / "scalar.onnx", "INT64", ()),
            "ids": models.embeddings(folder / "ids.onnx"),
        }.items():
            stack.push(name, path)
        yield stack


def again(stack: Stack, path: str, document: dict[str, Any]) -> httpx2.Response:
    """Send the example in an error document, as it says, and return the reply."""

    class Requests:
        """Has the method of the package `requests` that examples call."""

        def post(self, url: str, json: Any = None, data: Any = None, headers: Any = None) -> httpx2.Response:
            return stack.http.post(url, json=json, content=data, headers=headers)

    if "example" in document:
        return stack.http.post(path, json=document["example"])
    answered = eval(document["example_python"], {"requests": Requests(), "url": path})
    assert isinstance(answered, httpx2.Response)
    return answered


PATHS = (
    "/v2/models/{}/infer",
    "/v2/models/{}/versions/1/infer",
    "/v2/models/{}/generate",
    "/v1/models/{}:predict",
    "/predictions/{}",
    "/models/{}/invoke",
)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("model", MODELS)
def test_the_example_in_the_refusal_succeeds(stack: Stack, model: str, path: str) -> None:
    url = path.format(model)
    for body in (b"{", b"[1, 2", b'{"inputs": [{"name": "nope"}]}', b'{"instances": [{"nope": [1]}]}'):
        reply = stack.http.post(url, content=body, headers={"Content-Type": "application/json"})
        assert reply.status_code == 400, reply.text
        document = reply.json()
        assert document["signature"]["inputs"], document
        assert len(reply.content) < 8192
        answer = again(stack, url, document)
        assert answer.status_code == 200, (document, answer.text)


WRONG = {
    "name": [{"name": "nope", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}],
    "shape": [{"name": "input", "datatype": "FP32", "shape": [64], "data": [0] * 64}],
    "datatype": [{"name": "input", "datatype": "INT64", "shape": [1, 64], "data": [0] * 64}],
    "count": [{"name": "input", "datatype": "FP32", "shape": [1, 64], "data": [0] * 63}],
    "element": [{"name": "input", "datatype": "FP32", "shape": [1, 64], "data": ["a"] * 64}],
    "missing": [],
}


@pytest.mark.parametrize("wrong", sorted(WRONG))
def test_the_message_stays_one_line_for_the_clients(stack: Stack, wrong: str) -> None:
    body = {"inputs": WRONG[wrong]}
    document = stack.http.post("/v2/models/mlp/infer", json=body).json()
    assert list(document) == ["error", "signature", "example"]
    assert "\n" not in document["error"]
    assert document["signature"]["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 64]}]
    assert again(stack, "/v2/models/mlp/infer", document).status_code == 200
    asgi = stack.http.post("/v2/models/mlp/infer?x=1", json=body)  # a query takes the request off the fast path
    assert asgi.json() == document


def test_a_refusal_for_another_reason_has_no_example(stack: Stack) -> None:
    reply = stack.http.post("/v2/models/mlp/infer", content=b"{}", headers={"Content-Encoding": "br"})
    assert (reply.status_code, list(reply.json())) == (415, ["error"])
    assert list(stack.http.post("/v2/models/nothing/infer", json={}).json()) == ["error"]


def test_tritonclient_shows_the_message(stack: Stack) -> None:
    wrong = tc_http.InferInput("input", [1, 2], "FP32")
    wrong.set_data_from_numpy(__import__("numpy").zeros((1, 2), "f4"))
    with (
        tc_http.InferenceServerClient(f"127.0.0.1:{stack.port}") as client,
        pytest.raises(InferenceServerException) as caught,
    ):
        client.infer("mlp", [wrong])
    assert caught.value.message() == "unexpected shape for input 'input' for model 'mlp'. Expected [-1,64], got [1,2]."


@pytest.mark.parametrize("model", MODELS)
def test_the_example_in_a_grpc_status_succeeds(stack: Stack, model: str) -> None:
    with grpc.insecure_channel(stack.grpc) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        wrong = pb.ModelInferRequest(model_name=model)
        wrong.inputs.add(name="nope", datatype="FP32", shape=[1])
        with pytest.raises(grpc.RpcError) as caught:
            stub.ModelInfer(wrong)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        message = caught.value.details()
        assert message.startswith(f"unexpected inference input 'nope' for model '{model}'; inputs: ")
        assert len(message) <= 2048
        _, plain, text = message.partition("; a request that works: ")
        python = message.partition("; a request that works, in Python: ")[2]
        document = json.loads(text) if plain else eval(python)
        answer = stub.ModelInfer(json_format.ParseDict(document, pb.ModelInferRequest()))
        assert answer.model_name == model


def test_a_stream_gets_the_example_too(stack: Stack) -> None:
    import queue

    answers: queue.Queue[Any] = queue.Queue()
    with tc_grpc.InferenceServerClient(stack.grpc) as client:
        client.start_stream(lambda result, error: answers.put(error))
        client.async_stream_infer("mlp", [tc_grpc.InferInput("nope", [1], "FP32")])
        assert "; a request that works: {" in str(answers.get(timeout=300))


def test_boto3_users_find_the_example_in_the_original_message(stack: Stack) -> None:
    runtime = runtime_client(stack)
    for model in MODELS:
        with pytest.raises(ClientError) as caught:
            runtime.invoke_endpoint(
                EndpointName=model, Body=b'{"instances": [{"nope": 1}]}', ContentType="application/json"
            )
        original = json.loads(caught.value.response["OriginalMessage"])
        assert caught.value.response["Error"]["Message"] == original["error"]
        assert again(stack, f"/endpoints/{model}/invocations", original).status_code == 200
        body = original.get("example")
        if body is not None:
            answer = runtime.invoke_endpoint(EndpointName=model, Body=json.dumps(body), ContentType="application/json")
            assert json.loads(answer["Body"].read())


def test_openai_users_find_the_example_in_the_body(stack: Stack) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
    wrongs: list[Any] = ["text without a tokenizer", [], [[-1]]]
    for wrong in wrongs:
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="ids", input=wrong)
        body: Any = caught.value.body
        assert client.embeddings.create(**body["example"]).data[0].embedding
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="mlp", input="a")
    other: Any = caught.value.body
    assert "example" not in other  # the model gives no embeddings
    assert "gives no embeddings" in other["message"]


def test_classify_and_regress_offer_what_the_model_can_do(stack: Stack) -> None:
    for call in ("classify", "regress"):
        for model in MODELS:
            path = f"/v1/models/{model}:{call}"
            document = stack.http.post(path, json={"examples": 1}).json()
            if "example" in document or "example_python" in document:
                assert again(stack, path, document).status_code == 200


def test_an_image_is_not_printed(stack: Stack) -> None:
    document = stack.http.post("/v2/models/image/infer", json={}).json()
    assert "example" not in document
    assert "[0.0] * 150528" in document["example_python"]
