"""Which names and versions may become parts of paths."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.services.errors import Code, Failure
from millstream.services.model.names import NAME_CHARACTERS_MAX, VERSION_MAX, check_name, check_version


@pytest.mark.parametrize("name", ["a", "Z", "7", "res-net_50.v1", "x" * NAME_CHARACTERS_MAX, "a..b"])
def test_ordinary_names_are_taken_as_they_are(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "-a", "_a", ".a", "a.", "a/b", "a\\b", "a b", "a\n", "a\0", "é", "x" * (NAME_CHARACTERS_MAX + 1)],
)
def test_other_names_are_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(Failure, match=r"pool name .* is not allowed: use 1 to 128 letters") as caught:
        check_name(name, "pool name")
    assert caught.value.code is Code.INVALID
    assert "\n" not in caught.value.message


@given(st.text(max_size=12))
def test_a_name_that_is_taken_is_one_plain_path_component(name: str) -> None:
    try:
        check_name(name)
    except Failure:
        return
    assert PurePosixPath("/root", name).parts == ("/", "root", name)
    assert name.isascii()
    assert name not in {".", ".."}


@pytest.mark.parametrize("version", [1, 2, VERSION_MAX])
def test_versions_start_at_one(version: int) -> None:
    assert check_version(version) == version


@pytest.mark.parametrize("version", [0, -1, VERSION_MAX + 1, 10**30])
def test_other_numbers_are_no_versions(version: int) -> None:
    with pytest.raises(Failure, match="use a whole number from 1 to") as caught:
        check_version(version)
    assert caught.value.code is Code.INVALID
