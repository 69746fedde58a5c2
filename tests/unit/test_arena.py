"""Which bytes are free, one rule at a time."""

from __future__ import annotations

import pytest

from millstream.services.segments.segment import ALIGN_BYTES, Arena


def test_places_are_handed_out_from_the_front_each_on_a_cache_line():
    arena = Arena(1024)
    assert [arena.allocate(size) for size in (1, 64, 65, 100)] == [0, 64, 128, 256]
    assert arena.in_use_bytes == 64 + 64 + 128 + 128


def test_nothing_takes_a_place_too():
    arena = Arena(128)
    assert (arena.allocate(0), arena.allocate(0), arena.allocate(0)) == (0, 64, None)


@pytest.mark.parametrize("size_bytes", [0, 1, ALIGN_BYTES - 1])
def test_an_arena_smaller_than_a_line_has_no_room(size_bytes):
    arena = Arena(size_bytes)
    assert (arena.size_bytes, arena.allocate(1)) == (0, None)


def test_what_does_not_fit_is_refused_and_changes_nothing():
    arena = Arena(256)
    assert arena.allocate(257) is None
    assert arena.allocate(256) == 0
    assert arena.allocate(1) is None
    arena.free(0)
    assert (arena.allocate(256), arena.in_use_bytes) == (0, 256)


@pytest.mark.parametrize("order", [(0, 64, 128), (128, 64, 0), (64, 0, 128), (0, 128, 64), (128, 0, 64), (64, 128, 0)])
def test_neighbours_merge_in_whatever_order_they_are_freed(order):
    arena = Arena(192)
    for offset in (0, 64, 128):
        assert arena.allocate(64) == offset
    for offset in order:
        arena.free(offset)
    assert (arena.in_use_bytes, arena.allocate(192)) == (0, 0)


def test_a_hole_is_used_again_by_what_fits_in_it():
    arena = Arena(640)
    offsets = [arena.allocate(128) for _ in range(5)]
    arena.free(128)
    assert arena.allocate(192) is None
    assert (arena.allocate(64), arena.allocate(64), arena.allocate(64)) == (128, 192, None)
    assert offsets == [0, 128, 256, 384, 512]


@pytest.mark.parametrize("offset", [0, 64, 32, 4096, -64])
def test_freeing_what_is_not_allocated_shows(offset):
    arena = Arena(256)
    arena.allocate(64)
    arena.free(0)
    with pytest.raises(KeyError):
        arena.free(offset)
    assert (arena.in_use_bytes, arena.allocate(256)) == (0, 0)
