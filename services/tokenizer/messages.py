"""The messages to and from a process that tokenizes, each with its length before it. Pure.

process ── the tokenizer.json, then Texts or TRIAL ──> Loaded, then Encoded, one for each list of texts
What comes back is untrusted: a tokenizer may have taken the process over.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Sequence

import msgspec

from millstream.services.ingest.report import one_line

#: characters of an error that the library gives
ERROR_CHARACTERS_MAX = 300
#: bytes of one message; a tokenizer.json may be the largest
MESSAGE_BYTES_MAX = 128 << 20
LENGTH = struct.Struct("<I")
_NUMBER_BYTES = 4  # of a count, and of an id
TRIAL = b"\xc0"  # msgpack's nil: try texts of the tokenizer's own


class Limits(msgspec.Struct, frozen=True, array_like=True):
    """What texts may grow to.

    Args:
        text_tokens: of one text, whose ids are not sent beyond it.
        total_tokens: of one list of texts, likewise.
        grown_tokens_per_byte: tokens for each byte of a text, ...
        grown_tokens: ... and tokens beside these, for those that a tokenizer adds to every text.
    """

    text_tokens: int
    total_tokens: int
    grown_tokens_per_byte: int = 8
    grown_tokens: int = 64


class Texts(msgspec.Struct, frozen=True, array_like=True):
    """Lists of texts to encode, each for itself."""

    lists: list[list[str]]
    limits: Limits


class Encoded(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one list of texts.

    Args:
        error: why there is none, on one line; "": there is one.
        counts: tokens of each text, uint32.
        ids: of all texts, uint32; empty beyond the limits.
    """

    error: str = ""
    counts: bytes = b""
    ids: bytes = b""


_texts = msgspec.msgpack.Decoder(Texts)
_answers = msgspec.msgpack.Decoder(list[Encoded])
_encoder = msgspec.msgpack.Encoder()


def pack(message: Texts | Sequence[Encoded]) -> bytes:
    """Return a message as bytes."""
    return _encoder.encode(message)


def read_texts(content: bytes) -> Texts:
    """Return the lists of texts in a message."""
    return _texts.decode(content)


def read_answers(content: bytes, answers: int) -> list[Encoded]:
    """Return the answers in a message, with short errors. Raises ValueError unless it has so many.

    They are counted before they are decoded: each takes memory, and an empty one takes one byte of a message.
    """
    if _length_of_array(content) != answers:
        raise ValueError(f"a message has not {answers} answers")
    return [msgspec.structs.replace(one, error=_shown(one.error)) for one in _answers.decode(content)]


def _length_of_array(content: bytes) -> int:
    """Return the length of the array that a message is; -1: it is none. Source: the msgpack specification, arrays."""
    kind = content[0] if content else 0
    if kind & 0xF0 == 0x90:
        return kind & 0x0F
    width = {0xDC: 2, 0xDD: 4}.get(kind)
    return -1 if width is None else int.from_bytes(content[1 : 1 + width], "big")


def _shown(error: str) -> str:
    return one_line(error[:ERROR_CHARACTERS_MAX])


def numbers(values: Sequence[int]) -> bytes:
    """Return numbers as uint32. Raises OverflowError."""
    packed = array("I", values)
    return packed.tobytes()


def split_ids(answer: Encoded, texts: int, tokens_max: int) -> tuple[list[int], list[list[int]]]:
    """Return the count of each text, and its ids where the answer has them: at most `tokens_max`.

    Raises ValueError if they do not fit.
    """
    if len(answer.counts) != _NUMBER_BYTES * texts or len(answer.ids) > _NUMBER_BYTES * tokens_max:
        raise ValueError("an answer has more than was asked for")
    counts, ids = _array(answer.counts), _array(answer.ids)
    if ids and len(ids) != sum(counts):
        raise ValueError("the counts of an answer do not fit its texts")
    if not ids:
        return counts, [[] for _ in counts]
    entries, at = [], 0
    for count in counts:
        entries.append(ids[at : at + count])
        at += count
    return counts, entries


def _array(content: bytes) -> list[int]:
    found = array("I")
    assert (found.itemsize, sys.byteorder) == (_NUMBER_BYTES, "little")
    found.frombytes(content)
    return found.tolist()
