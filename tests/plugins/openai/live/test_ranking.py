"""Rerank and classification requests in the forms of their clients, held to ONNX Runtime's and numpy's results."""

from __future__ import annotations

import base64
import io
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import tokenizers
from PIL import Image

from tests.kit import models
from tests.kit.stack import Stack

WORDS = ["[UNK]", "the", "mill", "turns", "stream", "drives"]
DOCUMENTS = ["stream", "the mill turns", "drives the stream the mill"]
LABELS = [f"class {at}" for at in range(8)]


def tokenizer() -> str:
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(WORDS)}, "[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing(single="$A", pair="$A $B:1", special_tokens=[])
    return str(made.to_str())


def packed(model: Path) -> Path:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.write(model, "model.onnx")
        archive.writestr("tokenizer.json", tokenizer())
        archive.writestr("labels.txt", "\n".join(LABELS))
    path = model.with_suffix(".zip")
    path.write_bytes(file.getvalue())
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module", autouse=True)
def _served(shared_stack: Stack, folder: Path) -> None:
    embeddings = packed(models.embeddings(folder / "embeddings.onnx", pooled=True, types=True))
    shared_stack.push("rk-embeds", embeddings)
    shared_stack.push("rk-pairs", packed(models.cross_encoder(folder / "pairs.onnx")), config='{"rows_max": 2}')
    for scores in ("softmax", "sigmoid"):
        config = {"labels": {"embedding": "source/labels.txt"}, "classes": {"output": "embedding", "scores": scores}}
        shared_stack.push(f"rk-{scores}", embeddings, config=json.dumps(config))
    images = models.image_means(folder / "images.onnx", "pixel_values")
    shared_stack.push("rk-images", images, config='{"prepare": {"pixel_values": {"image": {}}}}')


def embedded(folder: Path, texts: list[str]) -> np.ndarray[Any, Any]:
    session = onnxruntime.InferenceSession(folder / "embeddings.onnx", providers=["CPUExecutionProvider"])
    rows = []
    for text in texts:
        ids = np.array([[WORDS.index(word) for word in text.split()]], np.int64)
        fed = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        rows.append(session.run(None, fed)[0][0])
    return np.array(rows)


def rerank(stack: Stack, path: str, **body: Any) -> Any:
    reply = stack.http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_an_embedding_model_ranks_by_cosine(stack: Stack, folder: Path) -> None:
    vectors = embedded(folder, ["the mill", *DOCUMENTS])
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = vectors[1:] @ vectors[0]
    found = rerank(stack, "/v1/rerank", model="rk-embeds", query="the mill", documents=DOCUMENTS)
    assert [one["index"] for one in found["results"]] == np.argsort(-scores).tolist()
    np.testing.assert_allclose([one["relevance_score"] for one in found["results"]], sorted(scores)[::-1], atol=1e-5)
    assert found["model"] == "rk-embeds"
    assert found["usage"]["total_tokens"] == 11


def test_a_cross_encoder_ranks_by_the_sigmoid_of_its_number(stack: Stack) -> None:
    def number(text: str) -> float:
        return sum(WORDS.index(word) / 4 for word in text.split())

    logits = np.array([number("the mill") - number(text) for text in DOCUMENTS])
    scores = 1 / (1 + np.exp(-logits))
    order = np.argsort(-scores).tolist()
    texts = [{"text": text} for text in DOCUMENTS]
    found = rerank(stack, "/v1/rerank", model="rk-pairs", query="the mill", documents=texts, return_documents=True)
    assert [one["index"] for one in found["results"]] == order
    assert [one["document"]["text"] for one in found["results"]] == [DOCUMENTS[at] for at in order]
    np.testing.assert_allclose([one["relevance_score"] for one in found["results"]], scores[order], rtol=1e-5)
    cohere = rerank(stack, "/v2/rerank", model="rk-pairs", query="the mill", documents=DOCUMENTS, top_n=2)
    assert [one["index"] for one in cohere["results"]] == order[:2]
    assert cohere["meta"]["api_version"] == {"version": "2"}
    bare = rerank(stack, "/rerank", model="rk-pairs", query="the mill", texts=DOCUMENTS, raw_scores=True)
    np.testing.assert_allclose([one["score"] for one in bare], logits[order], rtol=1e-5)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_all_classes_of_texts(stack: Stack, folder: Path, kind: str) -> None:
    logits = embedded(folder, DOCUMENTS)
    powers = np.exp(logits)
    wanted = powers / powers.sum(-1, keepdims=True) if kind == "softmax" else 1 / (1 + np.exp(-logits))
    found = rerank(stack, "/classify", model=f"rk-{kind}", input=DOCUMENTS)["data"]
    np.testing.assert_allclose([one["probs"] for one in found], wanted, rtol=1e-4)
    assert [one["label"] for one in found] == [LABELS[at] for at in wanted.argmax(-1)]
    (one,) = rerank(stack, "/classify", model=f"rk-{kind}", inputs=DOCUMENTS[:1])
    assert [best["label"] for best in one] == [LABELS[at] for at in np.argsort(-wanted[0])]
    alone = rerank(stack, "/classify", model=f"rk-{kind}", inputs=DOCUMENTS[0])
    assert alone == one


def test_embeddings_of_images(stack: Stack) -> None:
    file = io.BytesIO()
    Image.new("RGB", (224, 224), (255, 0, 51)).save(file, "PNG")
    text = base64.b64encode(file.getvalue()).decode()
    for entry in (text, [{"image": text}], [f"data:image/png;base64,{text}"]):
        found = rerank(stack, "/v1/embeddings", model="rk-images", input=entry)["data"]
        np.testing.assert_allclose(found[0]["embedding"], [1, 0, 0.2], atol=1e-5)


@pytest.mark.parametrize(
    ("path", "body", "error"),
    [
        ("/v1/rerank", {"model": "rk-pairs", "documents": ["a"]}, "'query' is a string"),
        ("/v1/rerank", {"model": "rk-pairs", "query": "a", "documents": []}, "'documents' is a list of 1 to 1000"),
        ("/v1/rerank", {"model": "rk-pairs", "query": "a", "documents": ["a", 1]}, "'documents[1]' is a string"),
        ("/rerank", {"model": "rk-pairs", "query": "a", "texts": "a"}, "'texts' is a list"),
        ("/v1/rerank", {"model": "rk-pairs", "query": "a", "documents": ["a"], "top_n": 0}, "'top_n'"),
        ("/v1/rerank", {"model": "rk-images", "query": "a", "documents": ["a"]}, "'image[0]' is no image"),
        ("/v1/rerank", {"query": "a", "documents": ["a"]}, "you must provide a model"),
        ("/classify", {"model": "rk-embeds", "input": "a"}, "is no classifier: it has no labels"),
        ("/classify", {"model": "rk-softmax", "input": [1]}, "'input[0]' is a string"),
    ],
)
def test_requests_that_cannot_be_answered(stack: Stack, path: str, body: Any, error: str) -> None:
    reply = stack.http.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert error in reply.json()["error"]["message"]
