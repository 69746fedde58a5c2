"""A first-fit allocator for the bytes of a segment, over address-ordered free ranges. Pure.

Adjacent free ranges merge at once, so that an unused segment is one range again.
Algorithm: Knuth, The Art of Computer Programming, vol. 1, section 2.5, algorithms A and B.
"""

from __future__ import annotations

from bisect import bisect_left

ALIGN_BYTES = 64  # a cache line, and sufficient for every vector load


class Arena:
    """Allocates offsets in `size_bytes` bytes; sizes are rounded up to multiples of ALIGN_BYTES."""

    __slots__ = ("_free", "_taken", "in_use_bytes", "size_bytes")

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // ALIGN_BYTES * ALIGN_BYTES
        self.in_use_bytes = 0
        self._free: list[tuple[int, int]] = [(0, self.size_bytes)] if self.size_bytes else []
        self._taken: dict[int, int] = {}

    def allocate(self, size_bytes: int) -> int | None:
        """Return the offset of a free range of at least `size_bytes` (at least 1), or None."""
        size = -(-max(size_bytes, 1) // ALIGN_BYTES) * ALIGN_BYTES
        for i, (start, length) in enumerate(self._free):
            if length >= size:
                if length == size:
                    del self._free[i]
                else:
                    self._free[i] = (start + size, length - size)
                self._taken[start] = size
                self.in_use_bytes += size
                return start
        return None

    def free(self, offset: int) -> None:
        """Free a range. Raises KeyError if it is not allocated: a double free must not go unnoticed."""
        size = self._taken.pop(offset)
        self.in_use_bytes -= size
        i = bisect_left(self._free, (offset, 0))
        end = offset + size
        if i < len(self._free) and self._free[i][0] == end:
            end += self._free.pop(i)[1]
        if i and sum(self._free[i - 1]) == offset:
            offset = self._free.pop(i - 1)[0]
            i -= 1
        self._free.insert(i, (offset, end - offset))
