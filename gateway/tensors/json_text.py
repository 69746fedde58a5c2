"""A JSON text -> its value, with bounds on what one parse may cost. Pure.

short text ─────────────────────────────────> parsed at once
long text ─> long lists of numbers set aside ─> the rest counted ─> parsed ─> NumberLists in their places

orjson holds the interpreter's lock while it parses, so a thread is no help to the event loop: whatever is parsed at once
has to be bounded. What costs is values (0.03 us each), containers and the keys of members (0.15 us), hardly bytes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

from millstream.gateway.tensors.number_list import LIST_BYTES_MIN, NumberList
from millstream.gateway.tensors.strict_json import loads, unparsable
from millstream.services.errors import Code, Failure

MIB = 1 << 20
#: texts up to this size are parsed whatever is in them: at worst, nested empty lists, that takes 20 ms
UNCOUNTED_BYTES_MAX = 256 * 1024
#: texts up to this size are parsed at once if they are within the limits, long lists and all
WHOLE_BYTES_MAX = MIB
#: so many plain values cost as much as a list or an object, and as a member of an object beside its value
CONTAINER_VALUES = 8
MEMBER_VALUES = 3
_WINDOW_BYTES = MIB
_MARK_BYTES = 8
#: what is not part of numbers (NaN and Infinity are), nor between them
_OTHER = re.compile(rb"[^][0-9+\-.eE, \t\r\nNaInfity]+")
_BACKSLASH = b"\\"


class JsonLimits(NamedTuple):
    """Of one document. Long lists of numbers are read in pieces and not counted where they may come as NumberLists.

    `values_max`: elements of lists and objects, a key counted as MEMBER_VALUES more, a container as CONTAINER_VALUES.
    """

    bytes_max: int = 16 * MIB
    values_max: int = 1_000_000


DEFAULT_LIMITS = JsonLimits()


def parse(text: bytes, limits: JsonLimits = DEFAULT_LIMITS, *, depth: int = -1, in_lists: bool = False) -> Any:
    """Return the JSON value in `text`.

    Args:
        text: UTF-8.
        limits: Of this document.
        depth: Long lists of numbers may come as NumberLists down to this depth, 0 being the value itself, -1: nowhere.
        in_lists: Also below an object that is an element of a list.

    Raises:
        Failure: INVALID, or TOO_LARGE for what is over `limits`.
    """
    if len(text) <= min(UNCOUNTED_BYTES_MAX, limits.bytes_max):
        return loads(text)
    if (depth < 0 or len(text) <= WHOLE_BYTES_MAX) and _Count(limits).fits(text):
        return loads(text)
    count = _Count(limits)
    found: list[NumberList] = []
    mark = secrets.token_hex(_MARK_BYTES)  # no client can guess it
    document = loads(_set_aside(text, count, found, mark.encode()))
    if found:
        document = _PutBack(mark, text, found, count, in_lists=in_lists).value(document, depth)
    return document


class _Count:
    """What was seen of a document so far. Its methods raise Failure(TOO_LARGE) beyond the limits."""

    def __init__(self, limits: JsonLimits) -> None:
        self._limits = limits
        self.size_bytes = self.values = self.strings = self.words = 0

    def fits(self, text: bytes) -> bool:
        """Whether `text` is within the limits even if all that looks like structure is: strings may hold such, too."""
        try:
            self.structure(text, 0, len(text))
        except Failure:
            return False
        return True

    def structure(self, text: bytes, start: int, end: int) -> None:
        """Count a part of `text` without strings."""
        for at in range(start, end, _WINDOW_BYTES):
            stop = min(end, at + _WINDOW_BYTES)
            containers = text.count(b"[", at, stop) + text.count(b"{", at, stop)
            members = text.count(b":", at, stop)
            self.values += CONTAINER_VALUES * containers + MEMBER_VALUES * members + text.count(b",", at, stop)
            self.size_bytes += stop - at
            self._check()

    def string(self, size_bytes: int) -> None:
        self.strings += 1
        self.size_bytes += size_bytes
        self._check()

    def word(self) -> None:
        """Something in the structure that is neither a number nor between numbers."""
        self.words += 1
        self._check()

    def _check(self) -> None:
        bytes_max, values_max = self._limits
        if self.size_bytes > bytes_max:
            raise _too_large(f"more than {bytes_max} bytes", "MILLSTREAM_JSON_BYTES_MAX")
        if max(self.values, self.strings, self.words) > values_max:
            raise _too_large(
                f"more than {values_max} values, of which a list or an object counts as {CONTAINER_VALUES}",
                "MILLSTREAM_JSON_VALUES_MAX",
            )


def _too_large(what: str, setting: str) -> Failure:
    return Failure(
        Code.TOO_LARGE, f"the JSON document has {what} ({setting}): send large tensors in binary form, or fewer of them"
    )


def _set_aside(text: bytes, count: _Count, found: list[NumberList], mark: bytes) -> bytes:
    """`text` with `["mark", index]` for each long list of numbers; what is left has been counted."""
    parts: list[bytes] = []
    at = copied = 0
    while at < len(text):
        quote = text.find(b'"', at)
        end = quote if quote >= 0 else len(text)
        counted = at
        for start, stop in _runs(text, at, end, count):
            numbers = NumberList.of(text, start, stop)
            if numbers is None:
                continue
            count.structure(text, counted, numbers.start)
            parts += (text[copied : numbers.start], b'["%b",%d]' % (mark, len(found)))
            found.append(numbers)
            copied = counted = numbers.end
        count.structure(text, counted, end)
        if quote < 0:
            break
        at = _string_end(text, quote)
        count.string(at - quote)
    parts.append(text[copied:])
    return b"".join(parts)


def _runs(text: bytes, start: int, end: int, count: _Count) -> Iterator[tuple[int, int]]:
    """Long stretches of numbers, commas and brackets, in a part of `text` without strings."""
    began = at = start
    while end - began >= LIST_BYTES_MIN:
        other = _OTHER.search(text, at, min(end, at + _WINDOW_BYTES))
        if other is None:
            at = min(end, at + _WINDOW_BYTES)
            if at < end:
                continue
        else:
            count.word()
        stop = end if other is None else other.start()
        if stop - began >= LIST_BYTES_MIN:
            yield began, stop
        began = at = end if other is None else other.end()


def _string_end(text: bytes, quote: int) -> int:
    """Where the string that begins at `quote` is over."""
    at = quote + 1
    while True:
        end = text.find(b'"', at)
        if end < 0:
            raise unparsable("a string has no end")
        before = text[at:end]
        if not (len(before) - len(before.rstrip(_BACKSLASH))) % 2:
            return end + 1
        at = end + 1


class _PutBack:
    """NumberLists in place of their marks where they may be, plain lists elsewhere."""

    def __init__(self, mark: str, text: bytes, found: list[NumberList], count: _Count, *, in_lists: bool) -> None:
        self._mark = mark
        self._text = text
        self._found = found
        self._count = count
        self._in_lists = in_lists

    def value(self, value: Any, depth: int) -> Any:
        """`value`, changed in place or replaced. `depth`: as far below it NumberLists may be."""
        if self._is_mark(value):
            numbers = self._found[value[1]]
            return numbers if depth >= 0 else self._plain(numbers)
        if depth <= 0 or (type(value) is list and not self._in_lists):
            self._plain_below(value)
            return value
        for key, element in enumerate(value) if type(value) is list else value.items():
            if type(element) in {list, dict}:
                value[key] = self.value(element, depth - 1)
        return value

    def _is_mark(self, value: Any) -> bool:
        return type(value) is list and len(value) == 2 and value[0] == self._mark

    def _plain(self, numbers: NumberList) -> Any:
        self._count.structure(self._text, numbers.start, numbers.end)
        return loads(self._text[numbers.start : numbers.end])

    def _plain_below(self, value: Any) -> None:
        """No recursion: nesting may be as deep as the parser takes."""
        stack: list[Any] = [value]
        while stack:
            holder = stack.pop()
            for key, element in enumerate(holder) if type(holder) is list else holder.items():
                if self._is_mark(element):
                    holder[key] = self._plain(self._found[element[1]])
                elif type(element) in {list, dict}:
                    stack.append(element)
