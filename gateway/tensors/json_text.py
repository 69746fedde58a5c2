"""A JSON text -> its value, with bounds on the cost of one parse. Pure.

short text ─────────────────────────────────> parsed at once
long text ─> long lists of numbers cut out ─> the rest counted ─> parsed ─> NumberLists put in place of the lists

orjson holds the interpreter's lock while it parses, so a thread would not keep the event loop free: each parse has to
be bounded. Its cost depends on the number of values (0.03 us each), of containers and of keys (0.15 us each), and
hardly on the number of bytes.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator
from typing import Any, NamedTuple

from millstream.gateway.tensors.json_document import loads, unparsable
from millstream.gateway.tensors.number_list import LIST_BYTES_MIN, NumberList
from millstream.services.errors import Code, Failure

MIB = 1 << 20
#: texts up to this size are parsed without counting: at worst (nested empty lists) this takes 20 ms
UNCOUNTED_BYTES_MAX = 256 * 1024
#: texts up to this size that are within the limits are parsed at once, their long lists included
WHOLE_BYTES_MAX = MIB
#: the cost of a list or object, and of the key of a member, in plain values
CONTAINER_VALUES = 8
MEMBER_VALUES = 3
_WINDOW_BYTES = MIB
_MARK_BYTES = 8
#: characters that are neither in numbers (NaN and Infinity included) nor between them
_OTHER = re.compile(rb"[^][0-9+\-.eE, \t\r\nNaInfity]+")
_BACKSLASH = b"\\"


class JsonLimits(NamedTuple):
    """Limits of one document. Long lists that become NumberLists are not counted: they are read in pieces."""

    bytes_max: int = 16 * MIB  # size of the text
    #: elements of lists and objects; a key counts as MEMBER_VALUES more, a container as CONTAINER_VALUES
    values_max: int = 1_000_000


DEFAULT_LIMITS = JsonLimits()


def parse(text: bytes, limits: JsonLimits = DEFAULT_LIMITS, *, depth: int = -1, in_lists: bool = False) -> Any:
    """Return the JSON value in `text`.

    Args:
        text: UTF-8.
        limits: Limits of this document.
        depth: Deepest level at which a long list of numbers becomes a NumberList. 0: only the whole value; -1: no list.
        in_lists: Whether this also holds within the elements of a list.

    Raises:
        Failure: INVALID, or TOO_LARGE for a text over `limits`.
    """
    if len(text) <= min(UNCOUNTED_BYTES_MAX, limits.bytes_max):
        return loads(text)
    if (depth < 0 or len(text) <= WHOLE_BYTES_MAX) and _Count(limits).fits(text):
        return loads(text)
    count = _Count(limits)
    lists: list[NumberList] = []
    mark = secrets.token_hex(_MARK_BYTES)  # random, so that no client can send it
    document = loads(_cut_out(text, count, lists, mark.encode()))
    if lists:
        document = _MarkReplacer(mark, text, lists, count, in_lists=in_lists).value(document, depth)
    return document


def parse_json(
    text: bytes, limits: JsonLimits = DEFAULT_LIMITS, *, depth: int = -1, in_lists: bool = False
) -> dict[str, Any]:
    """Return the JSON object in `text`. The arguments are those of `parse`.

    Raises:
        Failure: INVALID (not JSON, or no object), TOO_LARGE.
    """
    document = parse(text, limits, depth=depth, in_lists=in_lists)
    if type(document) is not dict:
        raise unparsable("the body is not a JSON object")
    return document


def parse_lines(text: bytes, limits: JsonLimits = DEFAULT_LIMITS) -> list[Any]:
    """Return the JSON value in each line of `text` that is not blank. The limits hold for all lines together.

    Raises:
        Failure: INVALID, with the number of the line, or TOO_LARGE.
    """
    if len(text) > min(UNCOUNTED_BYTES_MAX, limits.bytes_max):
        _Count(limits).structure(text, 0, len(text))
    values = []
    for number, line in enumerate(text.split(b"\n"), 1):
        if line.strip():
            try:
                values.append(loads(line))
            except Failure as failure:
                raise Failure(failure.code, f"line {number}: {failure.message}") from None
    return values


class _Count:
    """Counts the parts of a document. Its methods raise Failure(TOO_LARGE) beyond the limits."""

    def __init__(self, limits: JsonLimits) -> None:
        self._limits = limits
        self.size_bytes = self.values = self.strings = self.words = 0

    def fits(self, text: bytes) -> bool:
        """Whether `text` is within the limits even if brackets, colons and commas within strings are counted."""
        try:
            self.structure(text, 0, len(text))
        except Failure:
            return False
        return True

    def structure(self, text: bytes, start: int, end: int) -> None:
        """Count a part of `text` that has no strings."""
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
        """Count one stretch of other text than numbers and their separators."""
        self.words += 1
        self._check()

    def _check(self) -> None:
        bytes_max, values_max = self._limits
        if self.size_bytes > bytes_max:
            raise _too_large(f"more than {bytes_max} bytes", "MILLSTREAM_REQUEST_BYTES_MAX")
        if max(self.values, self.strings, self.words) > values_max:
            raise _too_large(
                f"more than {values_max} values, of which a list or an object counts as {CONTAINER_VALUES}",
                "MILLSTREAM_REQUEST_BYTES_MAX",
            )


def _too_large(excess: str, setting: str) -> Failure:
    return Failure(
        Code.TOO_LARGE,
        f"the JSON document has {excess} ({setting}): send large tensors in binary form, or fewer of them",
    )


def _cut_out(text: bytes, count: _Count, lists: list[NumberList], mark: bytes) -> bytes:
    """Return `text` with `["mark", index]` in place of each long list of numbers, and count the rest."""
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
            parts += (text[copied : numbers.start], b'["%b",%d]' % (mark, len(lists)))
            lists.append(numbers)
            copied = counted = numbers.end
        count.structure(text, counted, end)
        if quote < 0:
            break
        at = _string_end(text, quote)
        count.string(at - quote)
    parts.append(text[copied:])
    return b"".join(parts)


def _runs(text: bytes, start: int, end: int, count: _Count) -> Iterator[tuple[int, int]]:
    """Yield start and end of long stretches of numbers, commas and brackets. The part of `text` has no strings."""
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
    """Return the position after the string that begins at `quote`."""
    at = quote + 1
    while True:
        end = text.find(b'"', at)
        if end < 0:
            raise unparsable("a string has no end")
        before = text[at:end]
        if not (len(before) - len(before.rstrip(_BACKSLASH))) % 2:
            return end + 1
        at = end + 1


class _MarkReplacer:
    """Replaces marks by NumberLists where these are allowed, and elsewhere by plain lists."""

    def __init__(self, mark: str, text: bytes, lists: list[NumberList], count: _Count, *, in_lists: bool) -> None:
        self._mark = mark
        self._text = text
        self._lists = lists
        self._count = count
        self._in_lists = in_lists

    def value(self, value: Any, depth: int) -> Any:
        """Return `value` with its marks replaced, in place where possible. `depth`: as in `parse`, from `value`."""
        if self._is_mark(value):
            numbers = self._lists[value[1]]
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
        """Replace all marks below `value` by plain lists. Does not recurse: nesting may be as deep as orjson allows."""
        stack: list[Any] = [value]
        while stack:
            holder = stack.pop()
            for key, element in enumerate(holder) if type(holder) is list else holder.items():
                if self._is_mark(element):
                    holder[key] = self._plain(self._lists[element[1]])
                elif type(element) in {list, dict}:
                    stack.append(element)
