"""The process that tokenizes texts with the tokenizer.json of one version, which came with an upload.

python -m millstream.services.tokenizer.process PARENT
standard input: tokenizer.json, then lists of texts ─> sandbox ─> library ─> ids (standard output)
A normalizer may make a gigabyte of a letter, and an expression may never end: the sandbox bounds memory, the gateway
(services/tokenizer/client.py) time. No other process imports the library for texts of callers.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import IO, Any

from millstream.services.ingest.report import one_line
from millstream.services.sandbox.confine import Limits as ProcessLimits
from millstream.services.sandbox.confine import begin, confine
from millstream.services.tokenizer.messages import (
    ERROR_CHARACTERS_MAX,
    LENGTH,
    TRIAL,
    Encoded,
    Limits,
    numbers,
    pack,
    read_texts,
)

#: address space: what a tokenizer.json of 64 MiB takes, and 4 MiB of text, a hundred times its size
MEMORY_BYTES_MAX = 2 << 30
_CPU_S_MAX = 1 << 30  # the gateway ends one that takes long
#: what one text of a trial may become in bytes, for each byte of it, and beside that
_GROWN_BYTES_PER_BYTE = 64
_GROWN_BYTES = 4096
_TRIED_MAX = 1000
_TRIED_CHARACTERS_MAX = 64
_NO_LIMITS = Limits(1 << 30, 1 << 30)


def main() -> None:
    """Answer messages until the input ends."""
    begin(int(sys.argv[1]))
    source, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the library prints is no message
    confine((), (), limits=ProcessLimits(MEMORY_BYTES_MAX, _CPU_S_MAX, 0))
    content = _read(source)
    if content is None:
        return
    tokenizer, error = _load(content)
    _write(answers, pack([Encoded(error)]))
    while tokenizer is not None and (message := _read(source)) is not None:
        _write(answers, pack([_tried(tokenizer, content)] if message == TRIAL else _encoded(tokenizer, message)))


def _read(source: IO[bytes]) -> bytes | None:
    head = source.read(LENGTH.size)
    return source.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else None


def _write(target: IO[bytes], content: bytes) -> None:
    target.write(LENGTH.pack(len(content)) + content)
    target.flush()


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


def _alone(tokenizer: Any, texts: list[str], limits: Limits) -> Encoded:
    try:
        return _answer(texts, tokenizer.encode_batch(texts), limits)
    except BaseException as error:
        return Encoded(f"the text cannot be tokenized: {_line(error)}")


def _answer(texts: list[str], found: list[Any], limits: Limits) -> Encoded:
    counts = [len(one) for one in found]
    for text, count in zip(texts, counts, strict=True):
        bytes_max = len(text.encode())
        if count > limits.grown_tokens + limits.grown_tokens_per_byte * bytes_max:
            return Encoded(f"the model's tokenizer makes {count} tokens of {bytes_max} bytes of text")
    if max(counts, default=0) > limits.text_tokens or sum(counts) > limits.total_tokens:
        return Encoded(counts=numbers(counts))
    return Encoded(counts=numbers(counts), ids=numbers([number for one in found for number in one.ids]))


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
    main()
