"""No two places overlap, whatever is taken and given back in which order; in the end the arena is whole again."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.services.segments.segment import ALIGN_BYTES, Arena


@given(
    st.integers(0, 8192),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 1000)), max_size=200),
)
@settings(deadline=None, derandomize=True)
def test_places_are_disjoint_and_come_back(size_bytes: int, script: list[tuple[int, int]]) -> None:
    """Each step takes a place of some size; the second number says which ones are given back before."""
    arena = Arena(size_bytes)
    taken: dict[int, int] = {}
    for wanted, back in script:
        for offset in sorted(taken)[: back % (len(taken) + 1)][:: 1 + back % 3]:
            arena.free(offset)
            del taken[offset]
        place = arena.allocate(wanted)
        if place is None:
            assert largest_hole(arena.size_bytes, taken) < max(wanted, 1)
            continue
        assert place % ALIGN_BYTES == 0
        taken[place] = -(-max(wanted, 1) // ALIGN_BYTES) * ALIGN_BYTES
        ends = [(start, start + length) for start, length in sorted(taken.items())]
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))
        assert ends[-1][1] <= arena.size_bytes <= size_bytes
        assert arena.in_use_bytes == sum(taken.values())
    for offset in list(taken):
        arena.free(offset)
    assert arena.in_use_bytes == 0
    assert arena.allocate(arena.size_bytes) == (0 if arena.size_bytes else None)


def largest_hole(size_bytes: int, taken: dict[int, int]) -> int:
    at = largest = 0
    for start in [*sorted(taken), size_bytes]:
        largest = max(largest, start - at)
        at = start + taken.get(start, 0)
    return largest
