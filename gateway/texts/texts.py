"""texts: turns the texts of a request into token inputs, for all protocols, outside of the event loop.

BYTES input `text` ─> checked ─> TokenizerThread (strings ─> token ids ─> padded) ─> the inputs of the version
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import partial

from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.request_inputs import Inputs
from millstream.gateway.texts.text_plans import TEXT
from millstream.gateway.texts.token_inputs import token_inputs
from millstream.gateway.texts.tokenizer_thread import TokenizerThread
from millstream.gateway.texts.tokenizers import Tokenizers
from millstream.services.errors import invalid
from millstream.services.model.manifest import Manifest

#: texts of a request to a version that does not batch; rows_max bounds those of other versions
TEXTS_MAX = 2048
#: one text; a tokenizer needs about a hundred times as much memory
TEXT_BYTES_MAX = 256 << 10
#: all texts of a request
TEXTS_BYTES_MAX = 4 << 20
TOKENS_MAX = 8192  # of one text
TOKENS_TOTAL_MAX = 300_000

_LENGTH = struct.Struct("<I")


class Texts:
    """Tokenizes texts of a gateway's requests; the versions' turns are shared by all protocols.

    Args:
        tokenizers: tokenizers of the repository's versions.
        thread: runs them.
    """

    def __init__(self, tokenizers: Tokenizers, thread: TokenizerThread | None = None) -> None:
        self._tokenizers = tokenizers
        self._thread = thread or TokenizerThread()

    async def encode(self, manifest: Manifest, texts: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each text. Raises Failure, as Tokenizers.encode and TokenizerThread.run do."""
        return await self._thread.run(manifest.content_id, partial(self._tokenizers.encode, manifest, texts))

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
        return await self._thread.run(manifest.content_id, partial(self._inputs, manifest, plans, texts))

    def _inputs(self, manifest: Manifest, plans: InputPlans, texts: InputTensor) -> Inputs:
        entries = self._tokenizers.encode(manifest, strings_of(texts))
        check_tokens([len(ids) for ids in entries])
        return token_inputs(plans, entries)[0]


def check_texts(texts: InputTensor) -> None:
    """Raise Failure(INVALID) for no text, too many, or too many bytes in all."""
    count = texts.shape[0]
    if not 0 < count <= TEXTS_MAX:
        raise invalid(f"'{TEXT}' has {count} texts: at least 1, at most {TEXTS_MAX}")
    size_bytes = texts.size_bytes - count * _LENGTH.size
    if size_bytes > TEXTS_BYTES_MAX:
        raise invalid(f"'{TEXT}' has {size_bytes} bytes: at most {TEXTS_BYTES_MAX} in a request")


def strings_of(texts: InputTensor) -> list[str]:
    """Return the elements of a BYTES tensor, which must be UTF-8, and TEXT_BYTES_MAX each. Raises Failure(INVALID)."""
    data = bytes(texts.data)
    found: list[str] = []
    at = 0
    for index in range(texts.shape[0]):
        (size_bytes,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if size_bytes > TEXT_BYTES_MAX:
            raise invalid(f"'{TEXT}[{index}]' has {size_bytes} bytes: at most {TEXT_BYTES_MAX}")
        try:
            found.append(data[at : at + size_bytes].decode())
        except UnicodeDecodeError:
            raise invalid(f"'{TEXT}[{index}]' is not UTF-8") from None
        at += size_bytes
    return found


def check_tokens(counts: Sequence[int]) -> None:
    """Raise Failure(INVALID) for a text without a token, and for too many tokens in a text, or in all texts."""
    for index, count in enumerate(counts):
        if not count:
            raise invalid(f"'{TEXT}[{index}]' has no token")
        if count > TOKENS_MAX:
            raise invalid(f"'{TEXT}[{index}]' has {count} tokens: at most {TOKENS_MAX}")
    if sum(counts) > TOKENS_TOTAL_MAX:
        raise invalid(f"'{TEXT}' has {sum(counts)} tokens: at most {TOKENS_TOTAL_MAX} in a request")
