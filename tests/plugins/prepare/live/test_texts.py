"""Models that take token ids, called with texts over v2 REST, TensorFlow Serving's REST and gRPC."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tokenizers
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from huggingface_hub import InferenceClient
from tritonclient.utils import InferenceServerException

from tests.kit import models
from tests.kit.stack import Stack

VOCABULARY = {word: index for index, word in enumerate(["[UNK]", "[PAD]", "the", "mill", "turns", "stream", "drives"])}
TEXTS = ["the mill turns", "stream", "the unknown drives the mill"]
IDS = [[2, 3, 4], [5], [2, 0, 6, 2, 3]]


def tokenizer() -> Any:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return made


def archive(model: Path, content: str, **files: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        packed.write(model, "model.onnx")
        packed.writestr("tokenizer.json", content)
        for name, text in files.items():
            packed.writestr(f"{name}.txt", text)
    return file.getvalue()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.embeddings(tmp_path_factory.mktemp("models") / "tokens.onnx", pooled=True, types=True)


@pytest.fixture(scope="module", autouse=True)
def _served(shared_stack: Stack, model: Path) -> None:
    for name, content in (("tx-words", tokenizer().to_str()), ("tx-broken", "{}")):
        path = model.with_name(f"{name}.zip")
        path.write_bytes(archive(model, content))
        shared_stack.push(name, path)
    for name, classes in (("tx-label", 1), ("tx-labels", 2)):
        path = model.with_name(f"{name}.zip")
        path.write_bytes(archive(models.labelled(model.with_name(f"{name}.onnx"), classes), tokenizer().to_str()))
        shared_stack.push(name, path)
    path = model.with_name("tx-made.zip")
    path.write_bytes(archive(model, tokenizer().to_str(), labels="\n".join("abcdefgh")))
    for scores in ("softmax", "sigmoid"):
        config = {"labels": {"embedding": "source/labels.txt"}, "classes": {"output": "embedding", "scores": scores}}
        shared_stack.push(f"tx-{scores}", path, config=json.dumps(config))
    shared_stack.push("tx-plain", model)


@pytest.fixture
def client(stack: Stack) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(stack.grpc) as client:
        yield client


@pytest.fixture(scope="module")
def expected(model: Path) -> Any:
    """The output of each text alone, by ONNX Runtime."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    rows = []
    for ids in IDS:
        given = np.array([ids], np.int64)
        fed = {"input_ids": given, "attention_mask": np.ones_like(given), "token_type_ids": np.zeros_like(given)}
        rows.append(session.run(None, fed)[0][0])
    return np.array(rows)


def v2(texts: list[str], **more: Any) -> dict[str, Any]:
    return {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}], **more}


def test_v2_rest(stack: Stack, expected: Any) -> None:
    for repeated in range(2):  # the second request has a known envelope
        reply = stack.http.post("/v2/models/tx-words/infer", json=v2(TEXTS, id=f"r{repeated}"))
        assert reply.status_code == 200, reply.text
        assert reply.json()["id"] == f"r{repeated}"
        (output,) = reply.json()["outputs"]
        np.testing.assert_allclose(np.reshape(output["data"], output["shape"]), expected, rtol=1e-4, atol=1e-5)
    reply = stack.http.post("/v2/models/tx-words/versions/1/infer", json=v2(TEXTS[:1]))
    np.testing.assert_allclose(reply.json()["outputs"][0]["data"], expected[0], rtol=1e-4, atol=1e-5)


def test_token_ids_are_taken_as_before(stack: Stack, expected: Any) -> None:
    given = {"input_ids": IDS[0], "attention_mask": [1] * 3, "token_type_ids": [0] * 3}
    inputs = [{"name": name, "datatype": "INT64", "shape": [1, 3], "data": data} for name, data in given.items()]
    reply = stack.http.post("/v2/models/tx-words/infer", json={"inputs": inputs})
    np.testing.assert_allclose(reply.json()["outputs"][0]["data"], expected[0], rtol=1e-4, atol=1e-5)


def test_large_and_binary_bodies(stack: Stack, expected: Any) -> None:
    padded = [text + " " * 100_000 for text in TEXTS]  # decoded in a thread
    reply = stack.http.post("/v2/models/tx-words/infer", json=v2(padded))
    assert reply.status_code == 200, reply.text
    np.testing.assert_allclose(reply.json()["outputs"][0]["data"], expected.ravel(), rtol=1e-4, atol=1e-5)
    with triton_http.InferenceServerClient(stack.url.removeprefix("http://")) as client:
        given = triton_http.InferInput("text", [3], "BYTES")
        given.set_data_from_numpy(np.array([text.encode() for text in TEXTS], np.object_))
        answered = client.infer("tx-words", [given]).as_numpy("embedding")
        np.testing.assert_allclose(answered, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("body", "member"),
    [
        ({"instances": [{"text": text} for text in TEXTS]}, "predictions"),
        ({"instances": TEXTS}, "predictions"),
        ({"inputs": {"text": TEXTS}}, "outputs"),
        ({"inputs": TEXTS}, "outputs"),
    ],
)
def test_v1(stack: Stack, expected: Any, body: Any, member: str) -> None:
    reply = stack.http.post("/v1/models/tx-words:predict", json=body)
    assert reply.status_code == 200, reply.text
    np.testing.assert_allclose(reply.json()[member], expected, rtol=1e-4, atol=1e-5)


def test_v1_classify(stack: Stack, expected: Any) -> None:
    body = {"examples": [{"text": text} for text in TEXTS]}
    result = stack.http.post("/v1/models/tx-words:classify", json=body).json()["result"]
    scores = [[score for _, score in row] for row in result]
    np.testing.assert_allclose(scores, expected, rtol=1e-4, atol=1e-5)


def grpc_text(texts: list[str]) -> Any:
    given = triton.InferInput("text", [len(texts)], "BYTES")
    given.set_data_from_numpy(np.array([text.encode() for text in texts], np.object_))
    return given


def test_grpc(client: Any, expected: Any) -> None:
    for _ in range(2):
        reply = client.infer("tx-words", [grpc_text(TEXTS)], request_id="7", client_timeout=300)
        np.testing.assert_allclose(reply.as_numpy("embedding"), expected, rtol=1e-4, atol=1e-5)
        assert reply.get_response().id == "7"


def test_metadata_keeps_the_inputs_and_names_the_text(stack: Stack, client: Any) -> None:
    document = stack.http.get("/v2/models/tx-words").json()
    assert document["parameters"]["text_input"] == "text"
    assert document["parameters"]["usage"]["kind"] == "text"
    assert [spec["name"] for spec in document["inputs"]] == ["input_ids", "attention_mask", "token_type_ids"]
    assert "text_input" not in stack.http.get("/v2/models/tx-plain").json()["parameters"]
    assert [spec.name for spec in client.get_model_metadata("tx-words").inputs] == [
        "input_ids",
        "attention_mask",
        "token_type_ids",
    ]


MISTAKES = [
    ("tx-plain", ["a"], "unexpected inference input 'text' for model 'tx-plain'"),
    ("tx-broken", ["a"], "tokenizer.json of model 'tx-broken' cannot be read"),
    ("tx-words", [" "], "'text[0]' has no token"),
    ("tx-words", ["a"] * 2049, "'text' has 2049 texts: at least 1, at most 2048"),
    ("tx-words", ["the " * 9000], "has 9000 tokens: at most 8192"),
]


@pytest.mark.parametrize(("name", "texts", "error"), MISTAKES)
def test_mistakes_in_each_protocols_form(stack: Stack, client: Any, name: str, texts: list[str], error: str) -> None:
    reply = stack.http.post(f"/v2/models/{name}/infer", json=v2(texts))
    assert (reply.status_code, error in reply.json()["error"]) == (400, True), reply.text
    rows = [{"text": text} for text in texts]
    reply = stack.http.post(f"/v1/models/{name}:predict", json={"instances": rows})
    assert (reply.status_code, error in reply.json()["error"]) == (400, True), reply.text
    with pytest.raises(InferenceServerException) as refusal:
        client.infer(name, [grpc_text(texts)])
    assert refusal.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert error in refusal.value.message()


EMBEDDING_MISTAKES = [
    (["a " * (1 << 17) + "a"], "'input[0]' has 262145 bytes: at most 262144"),
    (["é" * (1 << 17)] * 17, "'input' has 4456448 bytes: at most 4194304 in a request"),
    (["a", " "], "'input[1]' has no token"),
    (["the " * 9000], "'input[0]' has 9000 tokens: at most 8192"),
]


@pytest.mark.parametrize(("texts", "error"), EMBEDDING_MISTAKES)
def test_texts_over_a_limit_are_refused_by_embeddings(stack: Stack, texts: list[str], error: str) -> None:
    reply = stack.http.post("/v1/embeddings", json={"model": "tx-words", "input": texts})
    assert (reply.status_code, error in reply.json()["error"]["message"]) == (400, True), reply.text


def numpy_file(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize("path", ["/endpoints/{}/invocations", "/models/{}/invoke"])
@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("text/csv", "\n".join(TEXTS).encode()),
        ("application/x-npy", numpy_file(np.array(TEXTS))),
    ],
    ids=["CSV", "NPY"],
)
def test_forms_without_texts_say_which_routes_take_them(stack: Stack, path: str, content_type: str, body: bytes):
    for name, said in (("tx-words", True), ("tx-plain", False)):
        reply = stack.http.post(path.format(name), content=body, headers={"Content-Type": content_type})
        message = reply.json().get("Message") or reply.json()["message"]
        assert ('texts go as {"instances": ["a text"]} in JSON to /invocations' in message) is said, message
        assert (f"'text' to /v2/models/{name}/infer" in message) is said, message
    reply = stack.http.post(path.format("tx-words"), json={"instances": ["the mill turns"]})
    assert reply.status_code == 200, "what the message says"


ROWS = [{"text": text} for text in TEXTS]
FRAME = {"columns": ["text"], "data": [[text] for text in TEXTS]}
OTHERS: list[tuple[str, Any]] = [
    ("/endpoints/tx-words/invocations", {"instances": ROWS}),
    ("/endpoints/tx-words/invocations", {"instances": TEXTS}),
    ("/endpoints/tx-words/invocations", {"inputs": {"text": TEXTS}}),
    ("/endpoints/tx-words/invocations", TEXTS),
    ("/endpoints/tx-words/invocations", {"dataframe_split": FRAME}),
    ("/endpoints/tx-words/invocations", {"dataframe_records": ROWS}),
    ("/models/tx-words/invoke", {"instances": ROWS}),
    ("/predictions/tx-words", {"text": TEXTS}),
    ("/v2/models/tx-words/generate", {"text": TEXTS}),
]


def numbers(document: Any) -> Any:
    """Return the rows in a reply, whichever member has them."""
    if isinstance(document, dict):
        return numbers(next(value for value in document.values() if isinstance(value, list)))
    return [numbers(next(iter(row.values()))) if isinstance(row, dict) else row for row in document]


@pytest.mark.parametrize(("path", "body"), OTHERS)
def test_texts_in_the_forms_of_other_protocols(stack: Stack, path: str, body: Any) -> None:
    wanted = stack.http.post("/v2/models/tx-words/infer", json=v2(TEXTS)).json()["outputs"][0]
    reply = stack.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    np.testing.assert_allclose(np.ravel(numbers(reply.json())), np.ravel(wanted["data"]), rtol=1e-5)


def test_v2_on_the_routes_of_sagemaker(stack: Stack, expected: Any) -> None:
    reply = stack.http.post("/endpoints/tx-words/invocations", json=v2(TEXTS))
    np.testing.assert_allclose(reply.json()["outputs"][0]["data"], expected.ravel(), rtol=1e-4, atol=1e-5)


def test_a_body_of_plain_text_is_one_text(stack: Stack) -> None:
    wanted = stack.http.post("/v2/models/tx-words/infer", json=v2(TEXTS[:1])).json()["outputs"][0]
    headers = {"content-type": "text/plain"}
    reply = stack.http.post("/predictions/tx-words", content=TEXTS[0], headers=headers)
    assert reply.status_code == 200, reply.text
    np.testing.assert_allclose(reply.json(), np.ravel(wanted["data"]), rtol=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/endpoints/tx-words/invocations", {"instances": [" "]}, 424),
        ("/models/tx-words/invoke", {"inputs": {"text": [" "]}}, 400),
        ("/predictions/tx-words", {"text": [" "]}, 400),
        ("/v2/models/tx-words/generate", {"text": [" "]}, 400),
    ],
)
def test_a_text_without_a_token_is_refused_by_other_protocols(stack: Stack, path: str, body: Any, status: int) -> None:
    reply = stack.http.post(path, json=body)
    assert (reply.status_code, "'text[0]' has no token" in reply.text) == (status, True), reply.text


def test_a_model_without_a_tokenizer_takes_no_text_in_any_protocol(stack: Stack) -> None:
    for path, body in OTHERS:
        reply = stack.http.post(path.replace("tx-words", "tx-plain"), json=body)
        assert reply.status_code in {400, 424}, (path, reply.text)


def test_pairs_are_refused(stack: Stack, client: Any) -> None:
    pair = [{**v2(["a"])["inputs"][0], "name": name} for name in ("text", "text_pair")]
    reply = stack.http.post("/v2/models/tx-words/infer", json={"inputs": pair})
    assert "pairs of texts are not tokenized here: send their token ids" in reply.json()["error"]
    body = {"instances": [{"text": "a", "text_pair": "b"}]}
    assert "pairs of texts" in stack.http.post("/v1/models/tx-words:predict", json=body).json()["error"]


def test_text_that_is_no_text(stack: Stack) -> None:
    for data in ([1], [None], [["a"], "b"]):
        body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": data}]}
        assert stack.http.post("/v2/models/tx-words/infer", json=body).status_code == 400
    unpaired = json.dumps({"instances": [{"text": "\ud800"}]}).encode()
    assert stack.http.post("/v1/models/tx-words:predict", content=unpaired).status_code == 400


def label(token: int) -> dict[str, Any]:
    return {"label": f"word-{token}", "score": pytest.approx(token / 10)}


@pytest.mark.parametrize("path", ["/endpoints/{}/invocations", "/models/{}/invoke"])
def test_bodies_of_hugging_face(stack: Stack, path: str, expected: Any) -> None:
    """Answered as a pipeline answers them, where the version has labels and scores."""

    def ask(model: str, body: Any) -> tuple[int, Any]:
        reply = stack.http.post(path.format(model), content=json.dumps(body).encode())
        document = reply.json()
        if reply.status_code == 424:  # what boto3 sees of the container's 400
            return document["OriginalStatusCode"], json.loads(document["OriginalMessage"])["error"]
        return reply.status_code, document if reply.status_code == 200 else document["message"]

    both = [[{"label": f"word-{token}-{k}", "score": pytest.approx(token / 10)} for k in (0, 1)] for token in (4, 5)]
    options = {"wait_for_model": True, "use_cache": False, "use_gpu": False}
    for model, body, answer in (
        ("tx-label", {"inputs": TEXTS[0]}, [label(4)]),
        ("tx-label", {"inputs": TEXTS[:2], "parameters": {}, "options": options}, [label(4), label(5)]),
        ("tx-label", {"inputs": [TEXTS[0]], "parameters": {"top_k": 1, "truncation": None}}, [label(4)]),
        ("tx-labels", {"inputs": TEXTS[:2]}, both),
        ("tx-labels", {"inputs": TEXTS[0], "parameters": {"top_k": 2}}, both[:1]),
        ("tx-label", {"instances": TEXTS[:1]}, {"predictions": [label(4)]}),
    ):
        assert ask(model, body) == (200, answer), body
    status, document = ask("tx-words", {"inputs": TEXTS[0]})
    np.testing.assert_allclose(document["predictions"], expected[:1], rtol=1e-4, atol=1e-5)
    assert status == 200
    for model, more, error in (
        ("tx-label", {"parameters": {"top_k": 2}}, "the parameter 'top_k' is not supported: it is 1: leave it out"),
        ("tx-label", {"parameters": {"top_k": True}}, "the parameter 'top_k' is not supported: it is 1: leave it out"),
        ("tx-labels", {"parameters": {"top_k": 1}}, "the parameter 'top_k' is not supported: it is 2: leave it out"),
        ("tx-label", {"parameters": {"truncation": True}}, "the parameter 'truncation' is not supported: leave it out"),
        ("tx-words", {"parameters": {"top_k": 1}}, "the parameter 'top_k' is not supported: leave it out"),
        ("tx-words", {"parameters": [1]}, "'parameters' is an object"),
        ("tx-words", {"options": {"cache": True}}, "the option 'cache' is unknown; these have no effect: dont_load"),
    ):
        status, message = ask(model, {"inputs": TEXTS[0], **more})
        assert (status, message[: len(error)]) == (400, error)


def test_labels_that_are_made_of_scores(stack: Stack, expected: Any) -> None:
    """As transformers' TextClassificationPipeline makes them."""
    soft = np.exp(expected) / np.exp(expected).sum(-1, keepdims=True)
    best = [{"label": "abcdefgh"[row.argmax()], "score": pytest.approx(row.max(), rel=1e-3)} for row in soft]
    every = [
        [{"label": "abcdefgh"[at], "score": pytest.approx(row[at], rel=1e-3)} for at in np.argsort(-row)]
        for row in 1 / (1 + np.exp(-expected))
    ]
    for scores, answer, count in (("softmax", best, 1), ("sigmoid", every, 8)):
        path = f"/endpoints/tx-{scores}/invocations"
        for texts, rows in ((TEXTS, answer), (TEXTS[0], answer[:1])):
            parameters = {"function_to_apply": scores, "top_k": count}
            assert stack.http.post(path, json={"inputs": texts, "parameters": parameters}).json() == rows
        reply = stack.http.post(path, json={"inputs": TEXTS[0], "parameters": {"function_to_apply": "none"}})
        assert f"'function_to_apply' is not supported: it is {scores}" in reply.json()["OriginalMessage"]


def test_the_client_of_hugging_face(stack: Stack) -> None:
    for name in ("tx-label", "tx-labels"):
        found = InferenceClient(model=f"{stack.url}/endpoints/{name}/invocations").text_classification(TEXTS[0])
        one = found[0] if isinstance(found, list) else found
        assert one.label == "word-4" + "-0" * (name == "tx-labels")
        assert one.score == pytest.approx(0.4)


def test_v1_takes_one_text_and_refuses_parameters(stack: Stack, expected: Any) -> None:
    reply = stack.http.post("/v1/models/tx-words:predict", json={"inputs": TEXTS[0], "parameters": {}})
    np.testing.assert_allclose(reply.json()["outputs"], expected[:1], rtol=1e-4, atol=1e-5)
    reply = stack.http.post("/v1/models/tx-words:predict", json={"inputs": TEXTS[0], "parameters": {"normalize": True}})
    assert (reply.status_code, "'normalize' is not supported" in reply.json()["error"]) == (400, True)
