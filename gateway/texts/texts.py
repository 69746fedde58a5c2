"""Turns the texts of a request into token inputs, for all protocols, outside of the event loop.

BYTES input `text` ─> checked ─> strings ─> Tokenizers: token ids ─> padded: the inputs of the version
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from millstream.gateway.tensors.input_plans import InputPlans, Inputs, join
from millstream.gateway.tensors.inputs import InputPlan, InputTensor
from millstream.gateway.tensors.nested_lists import from_array
from millstream.gateway.texts.text_limits import (
    PADDED_TOKENS_MAX,
    TEXTS_MAX,
    check_bytes,
    check_padded,
    check_text_bytes,
    check_tokens,
    check_total_bytes,
)
from millstream.gateway.texts.tokenizers import Tokenizers
from millstream.services.errors import invalid
from millstream.services.model.manifest import Manifest
from millstream.services.model.usage import IDS, MASK, TEXT, TYPES
from millstream.services.process.threads import run_in_thread_if_large

_LENGTH = struct.Struct("<I")
_ID_BYTES = 8


Array = np.ndarray[Any, Any]


def token_inputs(plans: InputPlans, entries: Sequence[Sequence[int]]) -> tuple[Inputs, Array]:
    """Return token ids as one request, and a mask of the tokens that are not padding. Raises Failure(INVALID).

    Args:
        plans: inputs of which `takes_tokens` is true.
        entries: the token ids of each row, at least one row.
    """
    width = _width(plans, entries)
    check_padded(len(entries), width)
    ids, mask = _padded(entries, width)
    columns = {IDS: ids, MASK: mask, TYPES: np.zeros_like(ids)}
    return join(plans, {plan.name: from_array(plan, columns[_role(plan)]) for plan in plans}), mask


def rows_padded_max(plans: InputPlans, entries: Sequence[Sequence[int]]) -> int:
    """Return how many of these entries `token_inputs` takes at once, at least 1. Raises Failure(INVALID)."""
    return max(1, PADDED_TOKENS_MAX // _width(plans, entries))


def _role(plan: InputPlan) -> str:
    return plan.name if plan.name in {MASK, TYPES} else IDS


def _width(plans: InputPlans, entries: Sequence[Sequence[int]]) -> int:
    """Return the tokens of each row, with padding: those that the model wants, else those of the longest entry."""
    longest = max(map(len, entries))
    fixed = next(plan for plan in plans if _role(plan) == IDS).shape[1]
    if fixed >= 0 and longest > fixed:
        raise invalid(f"the model takes at most {fixed} tokens, and an entry has {longest}")
    return longest if fixed < 0 else fixed


def _padded(entries: Sequence[Sequence[int]], width: int) -> tuple[Array, Array]:
    try:
        ids = np.array([[*entry, *[0] * (width - len(entry))] for entry in entries], np.int64)
    except OverflowError:
        raise invalid("a token id is out of the range of INT64") from None
    mask = (np.arange(width) < np.array([[len(entry)] for entry in entries])).astype(np.int64)
    return ids, mask


class Texts:
    """Tokenizes texts of a gateway's requests; the versions' processes are shared by all protocols.

    Args:
        tokenizers: tokenizers of the repository's versions.
    """

    def __init__(self, tokenizers: Tokenizers) -> None:
        self._tokenizers = tokenizers

    async def close(self) -> None:
        """End the processes of the tokenizers."""
        await self._tokenizers.close()

    async def encode(self, manifest: Manifest, texts: Sequence[str], name: str) -> list[list[int]]:
        """Return the token ids of each text.

        Args:
            manifest: of the version.
            texts: at least one.
            name: of the member of the request that has them, for messages.

        Raises:
            Failure: INVALID for texts over a limit or without a token; those of Tokenizers.encode.
        """
        check_bytes(name, texts)
        counts, entries = await self._tokenizers.encode(manifest, texts)
        check_tokens(name, counts)
        return entries

    async def inputs(self, manifest: Manifest, plans: InputPlans, texts: InputTensor) -> Inputs:
        """Return the inputs of a request with texts.

        Args:
            manifest: of the version.
            plans: the version's own plans, which take tokens.
            texts: BYTES, (texts,), checked by the plans of texts.

        Raises:
            Failure: INVALID for texts over a limit or without a token; those of `encode`.
        """
        check_texts(texts)
        strings = await run_in_thread_if_large(texts.size_bytes, strings_of, texts)
        entries = await self.encode(manifest, strings, TEXT)
        size_bytes = _ID_BYTES * len(entries) * max(map(len, entries))
        return (await run_in_thread_if_large(size_bytes, token_inputs, plans, entries))[0]


def check_texts(texts: InputTensor) -> None:
    """Raise Failure(INVALID) for no text, too many, or too many bytes in all."""
    count = texts.shape[0]
    if not 0 < count <= TEXTS_MAX:
        raise invalid(f"'{TEXT}' has {count} texts: at least 1, at most {TEXTS_MAX}")
    size_bytes = texts.size_bytes - count * _LENGTH.size
    check_total_bytes(TEXT, size_bytes)


def strings_of(texts: InputTensor) -> list[str]:
    """Return the elements of a BYTES tensor, which must be UTF-8, and TEXT_BYTES_MAX each. Raises Failure(INVALID)."""
    data = bytes(texts.data)
    found: list[str] = []
    at = 0
    for index in range(texts.shape[0]):
        (size_bytes,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        check_text_bytes(TEXT, index, size_bytes)
        try:
            found.append(data[at : at + size_bytes].decode())
        except UnicodeDecodeError:
            raise invalid(f"'{TEXT}[{index}]' is not UTF-8") from None
        at += size_bytes
    return found
