"""texts: turns the texts of a request into token inputs, for all protocols, outside of the event loop.

BYTES input `text` ─> checked ─> strings ─> Tokenizers: token ids ─> padded: the inputs of the version
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.request_inputs import Inputs
from millstream.gateway.texts.text_limits import (
    TEXTS_MAX,
    check_bytes,
    check_text_bytes,
    check_tokens,
    check_total_bytes,
)
from millstream.gateway.texts.token_inputs import token_inputs
from millstream.gateway.texts.tokenizers import Tokenizers
from millstream.services.errors import invalid
from millstream.services.model.manifest import Manifest
from millstream.services.model.usage import TEXT
from millstream.services.process.offload import run_in_thread_if_large

_LENGTH = struct.Struct("<I")
_ID_BYTES = 8


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
