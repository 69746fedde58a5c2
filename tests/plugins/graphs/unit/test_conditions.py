"""Conditions: what they mean, and that nothing else is understood."""

from __future__ import annotations

import numpy as np
import pytest

from millstream.plugins.graphs.conditions import ELEMENTS_MAX, ReadTensor, parse
from millstream.services.errors import Code, Failure


def tensor(*values: float, shape: tuple[int, ...] | None = None) -> ReadTensor:
    array = np.asarray(values, np.float32)
    return ReadTensor(array.shape if shape is None else shape, array)


TENSORS = {
    "scores": tensor(0.25, 0.5, 1.0),
    "detect.boxes": tensor(*range(8), shape=(2, 4)),
    "one": tensor(3.0),
    "none": tensor(shape=(0, 4)),
    "label": ReadTensor((1,), [b"cat"]),
    "texts": ReadTensor((2,), [b"a", b"b"]),
    "weird:0": tensor(1.0),
    "flags": ReadTensor((2,), np.array([True, False])),
}


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("max(scores) > 0.9", True),
        ("min(scores) > 0.9", False),
        ("mean(scores) < 0.6 and sum(scores) == 1.75", True),
        ("rows(detect.boxes) == 2 and size(detect.boxes) == 8", True),
        ("rows(none) > 0 and max(none) > 1", False),
        ("sum(none) == 0 and all(none) and not any(none)", True),
        ("any(flags) and not all(flags)", True),
        ("one == 3", True),
        ("one != 3 or one >= 3.0", True),
        ("2 < one <= 3", True),
        ("one == -3", False),
        ("label == 'cat'", True),
        ("'dog' == label", False),
        ('max("weird:0") == 1', True),
        ("one", True),
        ("not one", False),
        ("rows(texts) == 2", True),
    ],
)
def test_conditions(text, holds):
    assert parse(text).holds(TENSORS, {}) is holds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1 < 2",
        "x +",
        "x + 1 > 2",
        "__import__('os').system('true')",
        "max(x, y) > 1",
        "max(x=1) > 1",
        "open(x)",
        "x[0] > 1",
        "[x for x in y]",
        "lambda: x",
        "x if y else z",
        "x is None",
        "x in y",
        "max(max(x)) > 1",
        "f'{x}' == 'a'",
        "x < b'a'",
        "(x := 1)",
        "x ** 999999999 > 1",
        "~x",
        "not " * 40 + "x",
        "(" * 500 + "x" + ")" * 500,
    ],
)
def test_nothing_else_is_understood(text):
    with pytest.raises(Failure) as caught:
        parse(text)
    assert caught.value.code is Code.INVALID
    assert "condition" in caught.value.message


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("scores > 1", "scores has the shape [3], not one element"),
        ("max(none) > 1", "max(none): the tensor has no elements"),
        ("max(texts) > 1", "max(texts): the tensor has texts"),
        ("label > 1", "a text and a number are compared"),
        ("max(large) > 1", "elements are more than"),
    ],
)
def test_tensors_that_a_condition_cannot_read(text, says):
    large = ReadTensor((ELEMENTS_MAX + 1,), np.zeros(ELEMENTS_MAX + 1, np.uint8))
    with pytest.raises(Failure) as caught:
        parse(text).holds(TENSORS | {"large": large}, {})
    assert caught.value.code is Code.MODEL
    assert says in caught.value.message


def test_a_draw_is_one_number_for_each_request():
    below, above = parse('draw("a") < 0.3'), parse('draw("a") >= 0.3')
    outcomes = set()
    for _ in range(200):
        draws: dict[str, float] = {}
        outcomes.add((below.holds({}, draws), above.holds({}, draws)))
    assert outcomes == {(True, False), (False, True)}
