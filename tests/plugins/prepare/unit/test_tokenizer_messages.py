"""What a tokenizer process sends is bounded before it becomes objects: the process may have been taken over."""

from __future__ import annotations

import struct

import pytest

from millstream.plugins.prepare.tokenizer_process import (
    ERROR_CHARACTERS_MAX,
    Encoded,
    numbers,
    pack,
    read_answers,
    split_ids,
)


@pytest.mark.parametrize("count", [0, 1, 15, 16, 64, 70_000])
def test_answers_are_read_as_they_were_packed(count: int) -> None:
    answers = [Encoded(counts=numbers([number]), ids=numbers([7] * number)) for number in range(min(count, 3))]
    answers += [Encoded("wrong")] * (count - len(answers))
    assert read_answers(pack(answers), count) == answers


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc0",
        b"\xdc",
        b"\xdd\x00",
        pack([]),
        pack([Encoded()] * 2),
        b"\xdd" + struct.pack(">I", 50_000_000) + b"\x90" * 50_000_000,
        b"\x91" + b"\xdd" + struct.pack(">I", 50_000_000) + b"\xc0" * 50_000_000,
        b"\x91" * 100_000,
    ],
    ids=["nothing", "nil", "cut", "cut length", "none", "two", "many empty ones", "many fields", "nested"],
)
def test_what_is_not_one_answer_is_refused_without_taking_memory(content: bytes) -> None:
    with pytest.raises(ValueError, match=r".") as raised:
        read_answers(content, 1)
    assert len(str(raised.value)) < 1000


def test_an_error_is_one_short_line() -> None:
    (answer,) = read_answers(pack([Encoded("first\nsecond\x1b[31m" + "x" * 100_000)]), 1)
    assert "\n" not in answer.error
    assert "\x1b" not in answer.error
    assert len(answer.error) <= ERROR_CHARACTERS_MAX


def test_ids_beyond_the_limit_are_refused_before_they_are_split() -> None:
    assert split_ids(Encoded(counts=numbers([2, 1]), ids=numbers([5, 6, 7])), 2, 3) == ([2, 1], [[5, 6], [7]])
    for answer in (
        Encoded(counts=numbers([2, 2]), ids=numbers([5] * 4)),
        Encoded(counts=numbers([0] * 100_000)),
        Encoded(counts=numbers([1, 1]), ids=b"\0" * 9),
    ):
        with pytest.raises(ValueError, match=r"answer|item size"):
            split_ids(answer, 2, 3)
