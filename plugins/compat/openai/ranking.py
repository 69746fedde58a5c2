"""Answers rerank and classification requests, in the forms of Jina, Cohere, vLLM and text-embeddings-inference.

query, documents ─> a cross-encoder: pairs ─> sigmoid of its one number; else an embedding model: cosine
input ─> an input that is prepared (texts, images) ─> scores of all classes, with labels
Source: Jina AI, "Reranker API"; Cohere, "Rerank" v1 and v2; vLLM, protocol of /classify; text-embeddings-inference,
openapi.json: /rerank and /predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import orjson

from millstream.gateway.catalog.snapshot import Snapshot, visible
from millstream.gateway.scheduling.caller import Caller, infer_arrays
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.json_text import JsonLimits, parse
from millstream.gateway.tensors.outputs import as_numbers
from millstream.plugins.compat.openai.embedder import unit
from millstream.plugins.compat.openai.embeddings import Embeddings, embedder_of
from millstream.plugins.prepare.gateway.tokenizers import Tokenizers
from millstream.services.errors import invalid
from millstream.services.model.datatypes import FLOATS, encode_elements
from millstream.services.model.usage import takes_texts

DOCUMENTS_MAX = 1000
_TEXTS = "texts"  # the member of text-embeddings-inference, whose reply is a list

Array = np.ndarray[Any, Any]


class RerankCall(NamedTuple):
    """A query and the texts to order. `model` "": the only one. `bare`: the reply is a list, with logits if `raw`."""

    model: str
    query: str
    documents: list[str]
    top: int
    returned: bool
    bare: bool
    raw: bool


def read_rerank(body: bytes, limits: JsonLimits) -> RerankCall:
    """Return a rerank request. Raises Failure: INVALID, with the name of the member; TOO_LARGE."""
    document = _object(body, limits)
    member = _TEXTS if _TEXTS in document else "documents"
    query = document.get("query")
    if type(query) is not str or not query:
        raise invalid("'query' is a string, which is not empty")
    top = document.get("top_n")
    if top is not None and (type(top) is not int or top < 1):
        raise invalid("'top_n' is a whole number, at least 1")
    texts = _strings(document.get(member), member)
    returned = document.get("return_documents") or document.get("return_text")
    bare = member == _TEXTS
    return RerankCall(
        _model(document), query, texts, top or len(texts), returned is True, bare, document.get("raw_scores") is True
    )


class ClassifyCall(NamedTuple):
    """Texts or images to classify. `several`: whether they came as a list; `bare`: the reply is lists of labels."""

    model: str
    entries: list[str]
    several: bool
    bare: bool
    raw: bool


def read_classify(body: bytes, limits: JsonLimits) -> ClassifyCall:
    """Return a classification request. Raises Failure: INVALID, with the name of the member; TOO_LARGE."""
    document = _object(body, limits)
    member = "inputs" if "inputs" in document else "input"
    value = document.get(member)
    several = type(value) is list
    entries = _strings(value if several else [value], member)
    return ClassifyCall(_model(document), entries, several, member == "inputs", document.get("raw_scores") is True)


def _object(body: bytes, limits: JsonLimits) -> dict[str, Any]:
    document = parse(body, limits)
    if type(document) is not dict:
        raise invalid("the body is not a JSON object")
    return document


def _model(document: dict[str, Any]) -> str:
    model = document.get("model", "")
    if type(model) is not str:
        raise invalid("'model' is a string")
    return model


def _strings(value: Any, member: str) -> list[str]:
    if type(value) is not list or not 0 < len(value) <= DOCUMENTS_MAX:
        raise invalid(f"'{member}' is a list of 1 to {DOCUMENTS_MAX} strings")
    found = []
    for at, one in enumerate(value):
        text = next(iter(one.values())) if type(one) is dict and len(one) == 1 else one
        if type(text) is not str or not text:
            raise invalid(f"'{member}[{at}]' is a string, which is not empty, or an object with a text")
        found.append(text)
    return found


class Ranking:
    """Answers rerank and classification requests.

    Args:
        caller: finds versions and runs them.
        texts: tokenizes pairs of texts.
        embeddings: embeds query and documents for models that are no cross-encoders.
        snapshot: what is served, for requests that name no model.
    """

    def __init__(self, caller: Caller, texts: Tokenizers, embeddings: Embeddings, snapshot: Snapshot) -> None:
        self._caller = caller
        self._texts = texts
        self._embeddings = embeddings
        self._snapshot = snapshot

    async def rerank(self, request: RerankCall, *, cohere: bool) -> bytes:
        """Return the body of the reply; `cohere`: in the form of its version 2. Raises Failure."""
        route = self._route(request.model)
        if _is_cross_encoder(route):
            pairs = [(request.query, text) for text in request.documents]
            logits, tokens = await self._pairs(route, pairs)
            scores = logits if request.raw else 1 / (1 + np.exp(-logits))
        else:
            scores, tokens = await self._cosines(route, request)
        order = np.argsort(-scores, kind="stable")[: request.top]
        name = "score" if request.bare else "relevance_score"
        results: list[dict[str, Any]] = [{"index": int(at), name: float(scores[at])} for at in order]
        if request.returned:
            for result in results:
                text = request.documents[result["index"]]
                result |= {"text": text} if request.bare else {"document": {"text": text}}
        if request.bare:
            return orjson.dumps(results)
        if cohere:
            meta = {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}}
            return orjson.dumps({"id": "rerank", "results": results, "meta": meta})
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return orjson.dumps({"id": "rerank", "model": route.plans.model, "usage": usage, "results": results})

    async def classify(self, request: ClassifyCall) -> bytes:
        """Return the body of the reply: all classes of each entry. Raises Failure."""
        route = self._route(request.model)
        with self._caller.count_rejections(route):
            at, labels = _classes(route)
            if route.plans.prepared is None:
                raise invalid(f"model '{route.plans.model}' takes no texts and no images, which /classify gives it")
            raw = encode_elements([entry.encode() for entry in request.entries])
            inputs = await route.plans.prepared.prepare([InputTensor((len(request.entries),), raw, len(raw))])
        outputs = await infer_arrays(self._caller, route, inputs)
        logits = np.asarray(as_numbers(outputs[at]), np.float64)
        scores = logits if request.raw else _probabilities(route, logits)
        rows = [_labelled(row, labels) for row in scores]
        if request.bare:
            return orjson.dumps(rows if request.several else rows[0])
        data = [
            {"index": index, "label": row[0]["label"], "probs": scores[index].tolist(), "num_classes": len(labels)}
            for index, row in enumerate(rows)
        ]
        return orjson.dumps({"id": "classify", "object": "list", "model": route.plans.model, "data": data})

    def _route(self, model: str) -> ModelRoute:
        """Return the route of a model; "": of the only one that the caller may know of. Raises Failure."""
        if not model:
            served = [name for name, view in visible(self._snapshot).models.items() if view.serving is not None]
            if len(served) != 1:
                raise invalid(f"you must provide a model: 'model' is a string, and there are {len(served)} models")
            model = served[0]
        name, _, version = model.partition(":")
        return self._caller.find(name, version or None)

    async def _pairs(self, route: ModelRoute, pairs: Sequence[tuple[str, str]]) -> tuple[Array, int]:
        """Return the number that a cross-encoder computes for each pair, and the tokens of all."""
        rows_max = route.lane.manifest.config.rows_max if route.plans.signature.batching else 1
        order = sorted(range(len(pairs)), key=lambda at: len(pairs[at][1]))  # those of similar lengths run together
        logits = np.empty(len(pairs), np.float64)
        tokens = 0
        for begin in range(0, len(order), rows_max):
            some = order[begin : begin + rows_max]
            with self._caller.count_rejections(route):
                inputs, count = await self._texts.pair_inputs(
                    route.lane.manifest, route.plans, [pairs[at] for at in some], "documents"
                )
            tokens += count
            outputs = await infer_arrays(self._caller, route, inputs)
            logits[some] = np.ravel(as_numbers(outputs[0]))
        return logits, tokens

    async def _cosines(self, route: ModelRoute, request: RerankCall) -> tuple[Array, int]:
        """Return the cosine of the query and each document, and the tokens of all."""
        with self._caller.count_rejections(route):
            how = embedder_of(route)
            entries, tokens = await self._embeddings.entries(route, how, [request.query, *request.documents])
        vectors = unit(await self._embeddings.vectors(route, how, entries))
        return np.asarray(vectors[1:] @ vectors[0], np.float64), tokens


def _is_cross_encoder(route: ModelRoute) -> bool:
    """Whether a version gives one number for a text, or for a pair of texts."""
    signature = route.lane.manifest.signature
    shape = signature.outputs[0].shape
    one = len(signature.outputs) == 1 and signature.outputs[0].datatype in FLOATS and shape[1:] in {(), (1,)}
    return one and bool(shape) and takes_texts(route.lane.manifest)


def _classes(route: ModelRoute) -> tuple[int, Sequence[str]]:
    """Return the index of the output with a score for each class, and the labels. Raises Failure(INVALID)."""
    extensions = route.extensions
    at = extensions.classes if extensions.classes is not None else 0
    labels = extensions.labels[at]
    if not labels:
        raise invalid(f"model '{route.plans.model}' is no classifier: it has no labels (config.labels)")
    return at, labels


def _probabilities(route: ModelRoute, logits: Array) -> Array:
    classes = route.lane.manifest.config.classes
    if classes is None:  # the model answers scores, and nothing says that they are none
        return logits
    if classes.scores == "sigmoid":
        return np.asarray(1 / (1 + np.exp(-logits)))
    powers = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(powers / powers.sum(-1, keepdims=True))


def _labelled(row: Array, labels: Sequence[str]) -> list[dict[str, Any]]:
    return [{"label": labels[at], "score": float(row[at])} for at in np.argsort(-row, kind="stable")]
