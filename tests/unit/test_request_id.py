"""Ids of requests: taken if they are usable, else made; no two are equal."""

from __future__ import annotations

import subprocess
import sys

import pytest

from millstream.services.process.request_id import (
    CHARACTERS_MAX,
    REQUEST_ID,
    new_request_id,
    request_context,
    usable_request_id,
)


@pytest.mark.parametrize(
    "sent",
    [
        b"f81d4fae-7dec-11d0-a765-00a0c91e6bf6",
        b"01ARZ3NDEKTSV4RRFFQ69G5FAV",
        b"Zm9v/YmFy+w==",
        b"team@host:42~a_b.c",
        b"x" * CHARACTERS_MAX,
    ],
)
def test_a_usable_id_is_taken_as_it_is(sent: bytes) -> None:
    assert usable_request_id(b" \t" + sent + b" ") == sent


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"  ",
        b"x" * (CHARACTERS_MAX + 1),
        b"x" * 100_000,
        b"two words",
        b"a\r\nX-Forged: 1",
        b"a\x00b",
        b"\xc3\xa9",
        b"\xff",
        b'"quoted"',
        b"<script>",
        b"a;b",
        b"a,b",
        b"a%0Ab",
    ],
)
def test_other_ids_are_not_used(sent: bytes) -> None:
    assert usable_request_id(sent) is None


def test_new_ids_differ_and_are_usable() -> None:
    ids = {new_request_id() for _ in range(10_000)}
    assert len(ids) == 10_000
    assert all(usable_request_id(one) == one and len(one) < 32 for one in ids)


def test_ids_of_another_process_differ() -> None:
    code = "from millstream.services.process.request_id import new_request_id; print(new_request_id().decode())"
    ids = {subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout for _ in range(3)}
    assert len(ids) == 3


def test_the_id_is_set_within_the_block_only() -> None:
    assert REQUEST_ID.get() == ""
    with request_context(b"outer"):
        with pytest.raises(RuntimeError), request_context(b"inner"):
            assert REQUEST_ID.get() == "inner"
            raise RuntimeError
        assert REQUEST_ID.get() == "outer"
    assert REQUEST_ID.get() == ""
