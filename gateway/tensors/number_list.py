"""A long list of numbers in a JSON text, nested or flat, that is parsed in pieces. Pure.

[[1,2,3],[4,5,6], … ]  ─ pieces ─> [[1,2,3],[4,5]]  [[6], … ]    cut at any comma: gives the numbers in order
                       ─ rows ───> [[1,2,3],[4,5,6]]  [ … ]      cut between elements: gives the shape, too

Parsing one piece holds the interpreter's lock for a few milliseconds; parsing a whole list could for a second.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from millstream.gateway.tensors.json_document import loads, unparsable
from millstream.services.errors import Code, Failure

LIST_BYTES_MIN = 64 * 1024  # shorter lists are parsed at once
DEPTH_MAX = 100  # nesting of lists, as in newer reference servers
PIECE_BYTES = 128 * 1024  # text that is parsed at once
#: limits of one element of the outermost list in `rows`, which parses each element in one call
ELEMENT_BYTES_MAX = 16 << 20
ELEMENT_VALUES_MAX = 1_000_000
ELEMENT_LISTS_MAX = 125_000
#: lists within one NumberList: each costs as much as twenty numbers, even if it is empty
LISTS_MAX = 2_000_000

_OPEN, _CLOSE, _COMMA = b"[],"
_SPACE = b" \t\r\n"
_EDGE_BYTES_MAX = 4096  # brackets and white space before the first number, and after the last one
_LEAD = re.compile(rb"[\[ \t\r\n]*")


class NumberList:
    """A part of a JSON text, from `start` (its "[") to `end` (after its "]"): balanced brackets and numbers alone."""

    __slots__ = ("_level", "_text", "end", "rank", "start")

    def __init__(self, text: bytes, start: int, end: int, rank: int, level: int) -> None:
        self.start = start
        self.end = end
        self.rank = rank  # nesting of lists at the first number
        self._text = text
        self._level = level  # depth of the outermost list that has several elements

    @classmethod
    def of(cls, text: bytes, start: int, end: int) -> NumberList | None:
        """Return the list from the first to the last bracket between `start` and `end`; None if it is no long list."""
        first = text.find(b"[", start, end)
        last = text.rfind(b"]", start, end) + 1
        if first < 0 or last - first < LIST_BYTES_MIN:
            return None
        outline = _outline(text, first, last)
        return None if outline is None else cls(text, first, last, *outline)

    @property
    def leading_ones(self) -> int:
        """How many of the outermost lists have only one element."""
        return self._level - 1

    def pieces(self) -> Iterator[list[Any]]:
        """Yield the numbers in order, as lists nested as the text is. Raises Failure(INVALID) where it is not JSON."""
        text, at, end, depth = self._text, self.start, self.end, 0
        while at < end:
            cut = end if end - at <= PIECE_BYTES else text.rfind(b",", at, at + PIECE_BYTES)
            if cut < 0:
                raise unparsable(f"a number, or the white space beside it, is longer than {PIECE_BYTES} bytes")
            piece = text[at:cut]
            if at > self.start:
                _check_edge(piece.lstrip(_SPACE)[:1], b"]")
            if cut < end:
                _check_edge(piece.rstrip(_SPACE)[-1:], b"[")
            after = depth + piece.count(b"[") - piece.count(b"]")
            yield loads(b"[" * depth + piece + b"]" * after)
            at, depth = cut + 1, after

    def rows(self) -> Iterator[list[Any]]:
        """Yield a few elements at a time of the outermost list with several. Raises Failure: INVALID, TOO_LARGE."""
        text, at, end = self._text, self.start, self.end
        for _ in range(self._level):
            at = text.index(b"[", at) + 1
            end = text.rindex(b"]", at, end)
        while at <= end:
            cut = self._cut(at, end)
            piece = text[at:cut]
            _check_edge(piece.strip(_SPACE)[:1], b"")
            if len(piece) > PIECE_BYTES and (
                piece.count(b"[") > ELEMENT_LISTS_MAX or piece.count(b",") > ELEMENT_VALUES_MAX
            ):
                raise _element_too_large()
            yield loads(b"[%b]" % piece)
            at = cut + 1

    def _cut(self, at: int, end: int) -> int:
        """Return the position of the last comma between elements within the size of a piece, or `end`."""
        text, size = self._text, PIECE_BYTES
        while end - at > size:
            if self.rank == self._level:
                cut = text.rfind(b",", at, at + size)
            else:
                codes = np.frombuffer(text, np.uint8, size, at)
                commas = np.flatnonzero((codes == _COMMA) & (_depths(codes) == 0))
                cut = at + int(commas[-1]) if commas.size else -1
            if cut >= 0:
                return cut
            size *= 2
            if size > ELEMENT_BYTES_MAX:
                raise _element_too_large()
        return end


def _outline(text: bytes, start: int, end: int) -> tuple[int, int] | None:
    """Return the nesting at the first number, and at the outermost list with several elements; None: it is no list."""
    lead = _LEAD.match(text, start, min(end, start + _EDGE_BYTES_MAX))
    assert lead is not None
    tail = text[max(start, end - _EDGE_BYTES_MAX) : end]
    first, last = lead.end(), end - len(tail) + len(tail.rstrip(_SPACE + b"]"))
    if first == start + _EDGE_BYTES_MAX or last == end - len(tail) or first >= last:
        return None
    leading = text.count(b"[", start, first)
    if leading > DEPTH_MAX:
        raise unparsable("nested too deeply")
    level = depth = lists = leading
    if text.find(b"[", first, last) >= 0 or text.find(b"]", first, last) >= 0:
        for at in range(first, last, PIECE_BYTES):
            depths = _depths(np.frombuffer(text, np.uint8, min(PIECE_BYTES, last - at), at)) + depth
            level = min(level, int(depths.min()))
            lists += text.count(b"[", at, at + len(depths))
            if depths.max() > DEPTH_MAX:
                raise unparsable("nested too deeply")
            depth = int(depths[-1])
    if level < 1 or depth != text.count(b"]", last, end):
        return None
    if lists > LISTS_MAX:
        raise Failure(
            Code.TOO_LARGE, f"a list of numbers has more than {LISTS_MAX} lists in it: send it in binary form, or flat"
        )
    return leading, level


def _depths(codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return how many brackets each character leaves open, counted from the first character on."""
    steps = (codes == _OPEN).view(np.int8) - (codes == _CLOSE).view(np.int8)
    return np.cumsum(steps, dtype=np.int32)


def _check_edge(character: bytes, forbidden: bytes) -> None:
    """Raise Failure(INVALID) for a comma that has no element on one of its sides."""
    if character in {b"", forbidden}:
        raise unparsable("a list has a comma too many")


def _element_too_large() -> Failure:
    return Failure(
        Code.TOO_LARGE,
        f"one element of a list of numbers is larger than {ELEMENT_BYTES_MAX} bytes, or has more than "
        f"{ELEMENT_VALUES_MAX} numbers or {ELEMENT_LISTS_MAX} lists in it: send it in binary form",
    )
