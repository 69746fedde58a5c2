"""Answers an embeddings request of OpenAI's API, bytes to bytes.

read ─> route ─> tokens ─> runs of entries of similar lengths, several at once ─> vectors, in order
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import orjson

from millstream.gateway.scheduling.caller import Caller, infer_arrays
from millstream.gateway.scheduling.model_route import ModelRoute
from millstream.gateway.tensors.examples import Body, Target
from millstream.gateway.tensors.input_plans import InputPlans, Inputs
from millstream.gateway.tensors.json_text import DEFAULT_LIMITS, JsonLimits
from millstream.gateway.tensors.outputs import OutputTensor, dump_numbers
from millstream.plugins.compat.openai.embedder import Embedder, embedder, shortened
from millstream.plugins.compat.openai.request import INPUT, EmbeddingRequest, read
from millstream.plugins.prepare.gateway.tokenizers import Tokenizers
from millstream.services.errors import Code, Failure, invalid
from millstream.services.model.usage import MASK, TYPES
from millstream.services.process.threads import run_in_thread_if_large

RUNS_AT_ONCE_MAX = 8
_ADVISED_BYTES_MAX = 64 * 1024  # larger requests are not read again to find their model


class Embeddings:
    """Answers embeddings requests.

    Args:
        caller: finds versions and runs them.
        texts: tokenizes texts.
        json_limits: limits of a request.
    """

    def __init__(self, caller: Caller, texts: Tokenizers, json_limits: JsonLimits = DEFAULT_LIMITS) -> None:
        self._caller = caller
        self._json_limits = json_limits
        self._texts = texts

    async def answer(self, body: bytes) -> bytes:
        """Return the body of the reply to the request in `body`. Raises Failure."""
        try:
            request = await run_in_thread_if_large(len(body), read, body, self._json_limits)
        except Failure as failure:
            self._advise(failure, body)
            raise
        route = self._caller.find(request.model, request.version)
        with self._caller.count_rejections(route, embeddings_body):
            version_embedder = embedder_of(route)
            entries, tokens = await self.entries(route, version_embedder, request.entries)
        vectors = await self.vectors(route, version_embedder, entries)
        with self._caller.count_rejections(route, embeddings_body):
            vectors = shortened(vectors, request.dimensions)
        return await run_in_thread_if_large(vectors.nbytes, _written, request, vectors, tokens)

    def _advise(self, failure: Failure, body: bytes) -> None:
        """Add an example for the model that a request names which cannot be read otherwise."""
        if len(body) > _ADVISED_BYTES_MAX:
            return
        with suppress(Failure, ValueError, TypeError, AttributeError, KeyError):
            name, _, version = orjson.loads(body)["model"].partition(":")
            self._caller.find(name, version or None).plans.advise(failure, embeddings_body)

    async def entries(
        self, route: ModelRoute, version_embedder: Embedder, entries: Sequence[Any]
    ) -> tuple[Sequence[Any], int]:
        """Return the model's input for each entry, a text or token ids, and the number of tokens. Raises Failure."""
        texts = isinstance(entries[0], str)
        if version_embedder.prepared is not None and not texts:
            raise invalid("the model takes images: send them in base64")
        if version_embedder.text:
            await version_embedder.inputs(entries[:1])  # raises for token ids
        if version_embedder.text or version_embedder.prepared is not None:
            return entries, 0
        if texts:
            entries = await self._texts.ids(route.lane.manifest, entries, INPUT)
        return entries, sum(map(len, entries))

    async def vectors(
        self, route: ModelRoute, version_embedder: Embedder, entries: Sequence[Any]
    ) -> np.ndarray[Any, Any]:
        """Return the vector of each entry: a text or token ids, as the version takes them. Raises Failure."""
        rows_max = route.lane.manifest.config.rows_max if route.plans.signature.batching else 1
        with self._caller.count_rejections(route, embeddings_body):
            together = version_embedder.runs(entries, rows_max)
        turns = asyncio.Semaphore(RUNS_AT_ONCE_MAX)
        inside, ended = 0, asyncio.Event()  # runs of this request in the lane; set when the next of them ends

        async def admitted(inputs: Inputs) -> list[OutputTensor]:
            nonlocal inside, ended
            while True:
                inside += 1
                try:
                    outputs = await infer_arrays(self._caller, route, inputs)
                except Failure as failure:
                    inside -= 1
                    if failure.code is not Code.OVERLOADED or not inside:
                        raise
                    await ended.wait()  # what fills the lane may be this request's own runs
                    continue
                inside -= 1
                ended.set()
                ended = asyncio.Event()
                return outputs

        async def run(some: Sequence[Any]) -> np.ndarray[Any, Any]:
            async with turns:
                with self._caller.count_rejections(route, embeddings_body):
                    inputs, mask = await version_embedder.inputs(some)
                return version_embedder.vectors(await admitted(inputs), mask)

        runs = [asyncio.ensure_future(run([entries[at] for at in some])) for some in together]
        try:
            found = np.concatenate(await asyncio.gather(*runs))
            return found[np.argsort([at for some in together for at in some])]
        finally:
            for task in runs:
                task.cancel()


def embedder_of(route: ModelRoute) -> Embedder:
    """Return how a version embeds. Raises Failure(INVALID) if it gives no embeddings."""
    manifest = route.lane.manifest
    padded_max = 0 if manifest.imported is None else manifest.imported.padded_max
    return embedder(route.plans, padded_max, manifest.config.pooling)


def embeddings_body(target: Target) -> Body | None:
    """Return an embeddings request: a text if the model takes texts, else token ids; None for other models."""
    try:
        text = embedder(InputPlans(target.model, target.signature, 1)).text
    except Failure:
        return None
    if text:
        return Body({"model": target.model, "input": [target.samples[0].element]})
    ids = next(sample for sample in target.samples if sample.name not in {MASK, TYPES})
    return Body({"model": target.model, "input": [ids.row]})


def _written(request: EmbeddingRequest, vectors: np.ndarray[Any, Any], tokens: int) -> bytes:
    if request.base64:
        texts = [b'"%b"' % base64.b64encode(row.astype("<f4").tobytes()) for row in vectors]
    else:
        texts = [dump_numbers(np.ascontiguousarray(row)) for row in vectors]
    data = b",".join(
        [b'{"object":"embedding","index":%d,"embedding":%b}' % (index, text) for index, text in enumerate(texts)]
    )
    model = request.model if request.version is None else f"{request.model}:{request.version}"
    usage = b'{"prompt_tokens":%d,"total_tokens":%d}' % (tokens, tokens)
    return b'{"object":"list","data":[%b],"model":%b,"usage":%b}' % (data, orjson.dumps(model), usage)
