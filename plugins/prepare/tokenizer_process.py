"""The process that tokenizes texts with the tokenizer.json of one version, which came with an upload.

python -m millstream.plugins.prepare.tokenizer_process PARENT
standard input: tokenizer.json, then lists of texts ─> sandbox ─> library ─> ids (standard output)
A normalizer may make a gigabyte of a letter, and an expression may never end: the sandbox bounds memory, the gateway
(tokenizer_client.py) time. No other process imports the library for texts of callers.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Any

import msgspec

from millstream.plugins.prepare.confined_process import serve
from millstream.services.ingest.report import one_line

#: characters of an error that the library gives
ERROR_CHARACTERS_MAX = 300
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
    """Lists of texts, or of pairs of texts, to encode, each for itself."""

    lists: list[list[str | tuple[str, str]]]
    limits: Limits


class Encoded(msgspec.Struct, frozen=True, array_like=True):
    """The answer to one list of texts.

    Args:
        error: why there is none, on one line; "": there is one.
        counts: tokens of each text, uint32.
        ids: of all texts, uint32; empty beyond the limits.
        types: of the tokens of pairs, a byte each: 0 in the first text, 1 in the second; empty for texts.
    """

    error: str = ""
    counts: bytes = b""
    ids: bytes = b""
    types: bytes = b""


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


def split_types(answer: Encoded, counts: Sequence[int]) -> list[list[int]]:
    """Return the types of the tokens of each pair. Raises ValueError if they do not fit."""
    if len(answer.types) != sum(counts):
        raise ValueError("the types of an answer do not fit its pairs")
    ends = list(accumulate(counts))
    return [list(answer.types[end - count : end]) for count, end in zip(counts, ends, strict=True)]


def _array(content: bytes) -> list[int]:
    found = array("I")
    assert (found.itemsize, sys.byteorder) == (_NUMBER_BYTES, "little")
    found.frombytes(content)
    return found.tolist()


#: what one text of a trial may become in bytes, for each byte of it, and beside that
_GROWN_BYTES_PER_BYTE = 64
_GROWN_BYTES = 4096
_TRIED_MAX = 1000
_TRIED_CHARACTERS_MAX = 64
_NO_LIMITS = Limits(1 << 30, 1 << 30)


class _Loading:
    """Answers the messages of the process: first its tokenizer.json, then texts."""

    def __init__(self) -> None:
        self._content = b""
        self._tokenizer: Any = None

    def answer(self, message: bytes) -> bytes:
        """Return the packed answer to a message."""
        if self._tokenizer is None:
            self._content = message
            self._tokenizer, error = _load(message)
            return pack([Encoded(error)])
        if message == TRIAL:
            return pack([_tried(self._tokenizer, self._content)])
        return pack(_encoded(self._tokenizer, message))


def _load(content: bytes) -> tuple[Any, str]:
    """Return the tokenizer; or None, and what is wrong with it."""
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_buffer(content)
        tokenizer.no_padding()  # the gateway pads to the longest text of a run
    except BaseException as error:  # the library is in Rust: a panic is not an Exception
        return None, _line(error)
    return tokenizer, ""


def _encoded(tokenizer: Any, message: bytes) -> list[Encoded]:
    texts = read_texts(message)
    try:  # all at once: the library uses several cores
        found = tokenizer.encode_batch([text for one in texts.lists for text in one])
    except BaseException:
        return [_alone(tokenizer, one, texts.limits) for one in texts.lists]
    answers, at = [], 0
    for one in texts.lists:
        answers.append(_answer(one, found[at : at + len(one)], texts.limits))
        at += len(one)
    return answers


def _alone(tokenizer: Any, texts: list[str | tuple[str, str]], limits: Limits) -> Encoded:
    try:
        return _answer(texts, tokenizer.encode_batch(texts), limits)
    except BaseException as error:
        return Encoded(f"the text cannot be tokenized: {_line(error)}")


def _answer(texts: list[str | tuple[str, str]], found: list[Any], limits: Limits) -> Encoded:
    counts = [len(one) for one in found]
    for text, count in zip(texts, counts, strict=True):
        bytes_max = len(("".join(text)).encode())
        if count > limits.grown_tokens + limits.grown_tokens_per_byte * bytes_max:
            return Encoded(f"the model's tokenizer makes {count} tokens of {bytes_max} bytes of text")
    if max(counts, default=0) > limits.text_tokens or sum(counts) > limits.total_tokens:
        return Encoded(counts=numbers(counts))
    pairs = any(type(text) is tuple for text in texts)
    types = bytes([number for one in found for number in one.type_ids]) if pairs else b""
    return Encoded(counts=numbers(counts), ids=numbers([number for one in found for number in one.ids]), types=types)


def _tried(tokenizer: Any, content: bytes) -> Encoded:
    """Tokenize short texts that this tokenizer treats in a way of its own."""
    normalizer = tokenizer.normalizer
    for text in _texts_of(json.loads(content)):
        size_bytes, grown = len(text.encode()), 0
        with suppress(Exception):  # it may refuse a text
            grown = len(normalizer.normalize_str(text).encode()) if normalizer is not None else 0
        if grown > _GROWN_BYTES + _GROWN_BYTES_PER_BYTE * size_bytes:
            return Encoded(f"the normalizer of the tokenizer.json makes {grown} bytes of {size_bytes}")
        answer = _alone(tokenizer, [text], _NO_LIMITS)
        if "tokens of" in answer.error:
            return answer
    return Encoded()


def _texts_of(document: Any) -> Iterator[str]:
    """Yield texts to try: letters, what they stand in for, and what the tokenizer's own patterns look for."""
    yield from ("a", "A", "é", "字", " ", "\n", "0", "a" * 24 + "!")
    yield "".join(map(chr, range(32, 127)))
    yield from map(chr, range(33, 127))
    found = list(_strings([document.get(part) for part in ("normalizer", "pre_tokenizer", "added_tokens")]))
    for text in found[:_TRIED_MAX]:
        yield text[:_TRIED_CHARACTERS_MAX]


def _strings(document: Any) -> Iterator[str]:
    left = [document]
    while left:
        one = left.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one


def _line(error: BaseException) -> str:
    return one_line(str(error) or type(error).__name__)[:ERROR_CHARACTERS_MAX]


if __name__ == "__main__":
    serve(_Loading().answer)
