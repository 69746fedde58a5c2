"""Embeddings with OpenAI's client as it is, blocking and not, held to ONNX Runtime's own results."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import openai
import pytest
import tokenizers

from tests.kit import models
from tests.kit.stack import Stack

ENTRIES = [[1, 2, 3], [4], [5, 6, 7, 8]]
WORDS = ["the", "mill", "turns", "stream", "drives"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", autouse=True)
def _served(shared_stack: Stack, folder: Path) -> None:
    push = shared_stack.push
    push("ai-tokens", models.embeddings(folder / "tokens.onnx"))
    push("ai-pooled", models.embeddings(folder / "pooled.onnx", pooled=True, types=True), config='{"rows_max": 2}')
    push("ai-cls", folder / "tokens.onnx", config='{"pooling": {"tokens": "cls", "normalize": false}}')
    push("ai-mlp", models.mlp(folder / "mlp.onnx"))


@pytest.fixture
def client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)


def expected(path: Path, entries: list[list[int]], *, pooled: bool) -> np.ndarray[Any, Any]:
    """Each entry alone, by ONNX Runtime."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    rows = []
    for ids in entries:
        given = np.array([ids], np.int64)
        columns = {"input_ids": given, "attention_mask": np.ones_like(given), "token_type_ids": np.zeros_like(given)}
        inputs = {one.name: columns[one.name] for one in session.get_inputs()}
        output = session.run(None, inputs)[0][0]
        mean = output if pooled else output.mean(axis=0)
        rows.append(mean if pooled else mean / np.linalg.norm(mean))
    return np.array(rows)


def test_declared_pooling(client: openai.OpenAI, folder: Path) -> None:
    answered = client.embeddings.create(model="ai-cls", input=ENTRIES)
    session = onnxruntime.InferenceSession(folder / "tokens.onnx", providers=["CPUExecutionProvider"])
    for ids, found in zip(ENTRIES, answered.data, strict=True):
        given = np.array([ids], np.int64)
        columns = {"input_ids": given, "attention_mask": np.ones_like(given)}
        first = session.run(None, {one.name: columns[one.name] for one in session.get_inputs()})[0][0, 0]
        assert np.allclose(found.embedding, first, atol=1e-5)


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
@pytest.mark.parametrize("pooled", [False, True])
def test_token_ids(client: openai.OpenAI, folder: Path, encoding: Any, pooled: bool) -> None:
    name = "pooled" if pooled else "tokens"
    options = {} if encoding is None else {"encoding_format": encoding}
    reply = client.embeddings.create(model=f"ai-{name}", input=ENTRIES, **options)
    data = [one.embedding for one in reply.data]
    if encoding == "base64":
        data = [np.frombuffer(base64.b64decode(str(one)), "<f4").tolist() for one in data]
    np.testing.assert_allclose(data, expected(folder / f"{name}.onnx", ENTRIES, pooled=pooled), rtol=1e-4, atol=1e-6)
    assert [one.index for one in reply.data] == [0, 1, 2]
    assert (reply.model, reply.object, reply.data[0].object) == (f"ai-{name}", "list", "embedding")
    assert reply.usage.prompt_tokens == reply.usage.total_tokens == 8


def test_one_list_of_ids_many_entries_and_dimensions(client: openai.OpenAI, folder: Path) -> None:
    one = client.embeddings.create(model="ai-tokens:1", input=ENTRIES[0])
    np.testing.assert_allclose(
        one.data[0].embedding, expected(folder / "tokens.onnx", ENTRIES[:1], pooled=False)[0], rtol=1e-4
    )
    many = [[index % 32] * (index % 7 + 1) for index in range(200)]
    reply = client.embeddings.create(model="ai-pooled", input=many)
    np.testing.assert_allclose(
        [one.embedding for one in reply.data], expected(folder / "pooled.onnx", many, pooled=True), rtol=1e-4, atol=1e-5
    )
    short = client.embeddings.create(model="ai-tokens", input=ENTRIES, dimensions=3)
    vectors = np.array([one.embedding for one in short.data])
    assert vectors.shape == (3, 3)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_without_waiting(stack: Stack, folder: Path) -> None:
    async def ask() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{stack.url}/openai/v1", api_key="none") as client:
            asked = [client.embeddings.create(model="ai-tokens", input=ENTRIES) for _ in range(8)]
            return await asyncio.gather(*asked), await client.models.list()

    replies, listed = asyncio.run(ask())
    wanted = expected(folder / "tokens.onnx", ENTRIES, pooled=False)
    for reply in replies:
        np.testing.assert_allclose([one.embedding for one in reply.data], wanted, rtol=1e-4, atol=1e-6)
    assert "ai-tokens" in [one.id for one in listed.data]


def test_models(client: openai.OpenAI) -> None:
    assert "ai-tokens" in [one.id for one in client.models.list()]
    model = client.models.retrieve("ai-tokens")
    assert (model.id, model.object, model.owned_by) == ("ai-tokens", "model", "millstream")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nope")


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"model": "nope"}, openai.NotFoundError, "Request for unknown model: 'nope'"),
        ({"model": "ai-tokens:9"}, openai.NotFoundError, "version 9"),
        ({"model": "ai-mlp"}, openai.BadRequestError, "takes no input_ids"),
        ({"input": ""}, openai.BadRequestError, "empty string"),
        ({"input": [[1]] * 2049}, openai.BadRequestError, "at most 2048"),
        ({"input": "text"}, openai.BadRequestError, "has no tokenizer"),
        ({"dimensions": 9}, openai.BadRequestError, "'dimensions' is 9"),
        ({"encoding_format": "hex"}, openai.BadRequestError, "encoding_format"),
        ({"input": [[99]]}, openai.BadRequestError, "99 is outside of the model's table"),
    ],
)
def test_errors_as_the_client_reads_them(client: openai.OpenAI, options: Any, kind: Any, text: str) -> None:
    with pytest.raises(kind) as refusal:
        client.embeddings.create(**{"model": "ai-tokens", "input": ENTRIES, **options})
    body: Any = refusal.value.body
    assert text in body["message"]
    assert set(body) - {"signature", "example", "example_python"} == {"message", "type", "param", "code"}
    if kind is openai.NotFoundError:
        assert (body["code"], body["param"], body["type"]) == ("model_not_found", "model", "invalid_request_error")


def test_other_errors_have_the_same_form(stack: Stack) -> None:
    for method, path, status in (
        ("GET", "/v1/embeddings", 405),
        ("POST", "/v1/chat/completions", 404),
        ("POST", "/v1/embeddings", 400),
    ):
        reply = stack.http.request(method, path)
        assert reply.status_code == status
        assert reply.json()["error"]["type"] == "invalid_request_error"


def archive(model: Path, tokenizer: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as packed:
        packed.write(model, "model.onnx")
        packed.writestr("tokenizer.json", tokenizer)
    return file.getvalue()


def test_text(stack: Stack, client: openai.OpenAI, folder: Path) -> None:
    vocabulary = {"[UNK]": 0, "[PAD]": 1} | {word: index + 2 for index, word in enumerate(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.enable_padding(pad_id=1, pad_token="[PAD]")
    for name, content in (("ai-text", tokenizer.to_str()), ("ai-broken", "{}"), ("ai-pickle", "junk")):
        path = folder / f"{name}.zip"
        path.write_bytes(archive(folder / "tokens.onnx", content))
        stack.push(name, path)
    texts = ["the mill turns", "stream unknown"]
    reply = client.embeddings.create(model="ai-text", input=texts)
    ids = [[2, 3, 4], [5, 0]]
    np.testing.assert_allclose(
        [one.embedding for one in reply.data], expected(folder / "tokens.onnx", ids, pooled=False), rtol=1e-4, atol=1e-6
    )
    assert reply.usage.prompt_tokens == 5
    alone = client.embeddings.create(model="ai-text", input=texts[0])
    assert alone.data[0].embedding == pytest.approx(reply.data[0].embedding, rel=1e-4)
    for name in ("ai-broken", "ai-pickle"):
        with pytest.raises(openai.BadRequestError, match=r"tokenizer\.json of model"):
            client.embeddings.create(model=name, input=texts)
    with pytest.raises(openai.BadRequestError, match="at most 8192"):
        client.embeddings.create(model="ai-text", input="the " * 9000)
    body = json.dumps({"model": "ai-text", "input": "\ud800"}).encode()
    assert stack.http.post("/v1/embeddings", content=body).status_code == 400
