"""The names that an error message proposes, and that the search stays bounded."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.services.nearest_names import KEYS_MAX, NAMES_MAX, SHOWN_MAX, did_you_mean, nearest, unknown_key

NAMES = ["digits", "resnet50", "resnet18-int8", "sentence-embedder", "tf-add", "x", "ö-umlaut"]


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("digts", "digits"),
        ("Digits", "digits"),
        ("resnet_50", "resnet50"),
        ("resnet", "resnet50"),
        ("resnet18", "resnet18-int8"),
        ("sentence_embeder", "sentence-embedder"),
        ("tf_ad", "tf-add"),
        ("X", "x"),
        ("Ö_umlaut", "ö-umlaut"),
    ],
)
def test_the_nearest_name_comes_first(name: str, first: str) -> None:
    assert nearest(name, NAMES)[0] == first
    assert did_you_mean(name, NAMES).startswith(f"; did you mean '{first}'")


@pytest.mark.parametrize("name", ["", "zebra", "q" * 100_000, "\udc80", "\0", "' or 1=1"])
def test_other_names_get_no_proposal(name: str) -> None:
    assert did_you_mean(name, NAMES) == ""
    assert did_you_mean(name, []) == ""


def test_few_names_are_proposed() -> None:
    assert did_you_mean("model", ["model-a", "model-b", "model-c", "model-d"]).count("'") == 2 * SHOWN_MAX


def test_no_more_than_the_limit_of_names_is_read() -> None:
    endless = (f"name-{number}" for number in itertools.count())
    nearest("name", endless)
    assert next(endless) == f"name-{NAMES_MAX}"


@settings(deadline=None, derandomize=True)
@given(st.text(max_size=300), st.lists(st.text(max_size=40), max_size=60))
def test_any_names_are_compared(name: str, known: list[str]) -> None:
    found = nearest(name, known)
    assert len(found) <= SHOWN_MAX
    assert set(found) <= set(known) - {name}


def test_an_unknown_key_gets_the_valid_keys_nearest_first() -> None:
    said = unknown_key("row_max", ["pool", "rows_max", "batching"])
    assert said == "there is no field 'row_max': did you mean 'rows_max'? valid: rows_max, pool, batching"
    assert unknown_key("zzz", ["pool"], "setting") == "there is no setting 'zzz': valid: pool"
    many = unknown_key("zzz", [f"key{number}" for number in range(KEYS_MAX + 5)])
    assert many.endswith(f"key{KEYS_MAX - 1}, and 5 more")
