"""Makes inputs of an embedding model from token ids or texts, and one vector for each entry from its outputs. Pure.

ids ─> texts.token_inputs ─> input_ids, attention_mask, token_type_ids        output ─> pool ─> vectors, FP32
An output of (rows, dim) is used unchanged. An output of (rows, tokens, dim) is averaged over the entry's tokens,
without padding, and scaled to length 1. The version's `config.pooling` says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from millstream.gateway.tensors.input_plans import InputPlans, Inputs, join
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.nested_lists import from_lists
from millstream.gateway.tensors.outputs import OutputTensor, as_numbers
from millstream.gateway.tensors.prepared import PreparedPlans
from millstream.plugins.prepare.gateway.text_plans import Array, padded_width, rows_padded_max, token_inputs
from millstream.services.errors import Failure, invalid
from millstream.services.model.datatypes import BYTES, FLOATS, encode_elements
from millstream.services.model.manifest import Pooling
from millstream.services.model.signature import Signature
from millstream.services.model.usage import IDS, MASK, TYPES, takes_tokens

#: names of outputs that are embeddings, the preferred name first, for models with several outputs
_OUTPUTS = ("sentence_embedding", "embeddings", "embedding", "token_embeddings", "last_hidden_state")


#: tokens of a run, with padding; more gain nothing
RUN_TOKENS_MAX = 16_384
#: a shorter text joins the run of a longer one if its tokens are at least so many of the longest one's
_SIMILAR = 0.75


class Embedder(NamedTuple):
    """How a version embeds.

    Args:
        output: index of the embeddings.
        text: whether its input takes texts, not token ids.
        padded_max: tokens up to which rows are padded to one of few lengths; 0: they are padded to the longest.
        pooling: of the version's configuration; None: it has none.
    """

    plans: InputPlans
    output: int
    text: bool
    padded_max: int = 0
    pooling: Pooling | None = None

    @property
    def prepared(self) -> PreparedPlans | None:
        """What makes its input of an encoded image; None: it takes texts or token ids."""
        return None if self.text or takes_tokens(self.plans.signature) else self.plans.prepared

    def runs(self, entries: Sequence[Any], rows_max: int) -> list[list[int]]:
        """Return which entries run together, as indices: those of similar lengths. Raises Failure(INVALID).

        `rows_max`: of a run.
        """
        if self.text or self.prepared is not None:
            every = range(len(entries))
            return [list(every[at : at + rows_max]) for at in range(0, len(entries), rows_max)]
        rows_padded_max(self.plans, entries)  # refuses an entry that is too long
        lengths = [len(entry) for entry in entries]
        found: list[list[int]] = []
        longest = 1
        for at in sorted(range(len(entries)), key=lengths.__getitem__, reverse=True):
            width = padded_width(lengths[at], self.padded_max)
            room = found and len(found[-1]) < min(rows_max, RUN_TOKENS_MAX // longest)
            if not room or width < _SIMILAR * longest:
                longest = width
                found.append([])
            found[-1].append(at)
        return found

    async def inputs(self, entries: Sequence[Any]) -> tuple[Inputs, Array]:
        """Return the entries as one request, and a mask of the tokens that are not padding. Raises Failure."""
        if self.prepared is not None:
            raw = encode_elements([entry.encode() for entry in entries])
            return await self.prepared.prepare([InputTensor((len(entries),), raw, len(raw))]), _ones(entries)
        if self.text:
            plan = next(iter(self.plans))
            rows = [[entry] for entry in entries] if len(plan.shape) == 2 else list(entries)
            return join(self.plans, {plan.name: from_lists(plan, rows)}), _ones(entries)
        return token_inputs(self.plans, entries, self.padded_max)

    def vectors(self, outputs: Sequence[OutputTensor], mask: Array) -> Array:
        """Return (entries, dim) in FP32. Raises Failure(INVALID) for an output of a shape that is no embedding."""
        output = outputs[self.output]
        array = as_numbers(output).astype(np.float32)
        how = self.pooling
        if array.ndim == 3 and array.shape[:2] == mask.shape:
            pooled = _pooled(array, mask, "mean" if how is None else how.tokens)
            return unit(pooled) if how is None or how.normalize else pooled
        if array.ndim != 2 or len(array) != len(mask):
            raise invalid(f"the model's output has the shape {list(output.shape)}, which is no embedding of each entry")
        return unit(array) if how is not None and how.normalize else array


def _ones(entries: Sequence[Any]) -> Array:
    return np.ones((len(entries), 1), np.int64)


def embedder(plans: InputPlans, padded_max: int = 0, pooling: Pooling | None = None) -> Embedder:
    """Return how the version of `plans` embeds. Raises Failure(INVALID) if it gives no embeddings.

    `padded_max`, `pooling`: as of Embedder.
    """
    output = _output(plans.model, plans.signature)
    only = next(iter(plans)) if len(plans) == 1 else None
    if only is not None and only.datatype == BYTES and len(only.shape) in {1, 2}:
        return Embedder(plans, output, text=True, pooling=pooling)
    if not takes_tokens(plans.signature) and (plans.prepared is None or len(plans) != 1):
        raise _none(plans.model, f"it takes no {IDS} (with {MASK}, {TYPES}), no text and no image")
    return Embedder(plans, output, False, padded_max, pooling)


def _output(model: str, signature: Signature) -> int:
    outputs = signature.outputs
    names = [spec.name for spec in outputs]
    index = 0 if len(outputs) == 1 else next((names.index(name) for name in _OUTPUTS if name in names), -1)
    if index < 0:
        raise _none(model, f"none of its {len(outputs)} outputs is called {', '.join(_OUTPUTS)}")
    if outputs[index].datatype not in FLOATS or len(outputs[index].shape) not in {2, 3}:
        raise _none(model, f"its output '{names[index]}' is not (rows, dim) or (rows, tokens, dim)")
    return index


def _none(model: str, why: str) -> Failure:
    return invalid(f"model '{model}' gives no embeddings: {why}")


def _pooled(array: Array, mask: Array, tokens: str) -> Array:
    """Return (rows, dim) of (rows, tokens, dim)."""
    if tokens == "cls":
        return array[:, 0]
    if tokens == "last":
        last: Array = array[np.arange(len(array)), mask.sum(axis=1) - 1]
        return last
    weights = mask[:, :, None].astype(np.float32)
    mean: Array = (array * weights).sum(axis=1) / weights.sum(axis=1)
    return mean


def unit(vectors: Array) -> Array:
    """Return the vectors scaled to length 1; a vector of zeros is unchanged."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(np.divide(vectors, lengths, out=vectors.copy(), where=lengths > 0), np.float32)


def shortened(vectors: Array, dimensions: int) -> Array:
    """Return the first `dimensions` of each vector, scaled to length 1; 0: unchanged. Raises Failure(INVALID)."""
    if not dimensions:
        return vectors
    if dimensions > vectors.shape[1]:
        raise invalid(f"'dimensions' is {dimensions}, but the model's embeddings have {vectors.shape[1]}")
    return unit(vectors[:, :dimensions])
