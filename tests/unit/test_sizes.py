"""Two numbers of bytes in one message: which of them is the larger one can always be seen."""

from __future__ import annotations

from millstream.services.sizes import sizes

MIB = 1 << 20


def test_a_need_that_is_just_too_large_looks_larger() -> None:
    assert sizes(321 * MIB, 321 * MIB - 1, 0) == ("321 MiB", "320 MiB", "0 MiB")
    assert sizes(321 * MIB + 1, 321 * MIB) == ("322 MiB", "321 MiB")


def test_small_needs_are_told_in_bytes() -> None:
    assert sizes(10 * MIB - 1, 400 * MIB) == (f"{10 * MIB - 1} bytes", f"{400 * MIB} bytes")
