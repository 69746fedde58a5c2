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
from collections.abc import Callable, Iterator
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
#: Deepest level of a NumberList: document, inputs or instances, one of them, its data or one of its inputs.
LISTS_DEPTH = 3
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


def parse(text: bytes, limits: JsonLimits = DEFAULT_LIMITS, *, number_lists: bool = False) -> Any:
    """Return the JSON value in `text`, which is UTF-8. Raises Failure: INVALID, or TOO_LARGE for a text over `limits`.

    `number_lists`: long lists of numbers become NumberLists, down to LISTS_DEPTH.
    """
    if len(text) <= min(UNCOUNTED_BYTES_MAX, limits.bytes_max):
        return loads(text)
    if (not number_lists or len(text) <= WHOLE_BYTES_MAX) and _Count(limits).fits(text):
        return loads(text)
    count = _Count(limits)
    lists: list[NumberList] = []
    mark = secrets.token_hex(_MARK_BYTES)  # random, so that no client can send it
    document = [loads(_cut_out(text, count, lists, mark.encode()))]
    if lists:
        _replace_marks(
            document, mark, lists, lambda one: count.plain(text, one), LISTS_DEPTH + 1 if number_lists else 0
        )
    return document[0]


def parse_json(text: bytes, limits: JsonLimits = DEFAULT_LIMITS, *, number_lists: bool = False) -> dict[str, Any]:
    """Return the JSON object in `text`. Raises Failure: INVALID (not JSON, or no object), TOO_LARGE."""
    document = parse(text, limits, number_lists=number_lists)
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

    def plain(self, text: bytes, numbers: NumberList) -> Any:
        """Count a list of numbers like everything else, and return it."""
        self.structure(text, numbers.start, numbers.end)
        return loads(text[numbers.start : numbers.end])

    def _check(self) -> None:
        bytes_max, values_max = self._limits
        excess = ""
        if self.size_bytes > bytes_max:
            excess = f"more than {bytes_max} bytes"
        elif max(self.values, self.strings, self.words) > values_max:
            excess = f"more than {values_max} values, of which a list or an object counts as {CONTAINER_VALUES}"
        if excess:
            raise Failure(
                Code.TOO_LARGE,
                f"the JSON document has {excess} (MILLSTREAM_REQUEST_BYTES_MAX): send large tensors in binary form, "
                "or fewer of them",
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


def _replace_marks(
    document: list[Any], mark: str, lists: list[NumberList], plain: Callable[[NumberList], Any], depth: int
) -> None:
    """Replace marks by NumberLists in the outer `depth` levels, and below by plain lists.

    Does not recurse: nesting may be as deep as orjson allows.
    """
    stack: list[tuple[Any, int]] = [(document, depth)]
    while stack:
        holder, left = stack.pop()
        for key, element in enumerate(holder) if type(holder) is list else holder.items():
            if type(element) is list and len(element) == 2 and element[0] == mark:
                numbers = lists[element[1]]
                holder[key] = numbers if left > 0 else plain(numbers)
            elif type(element) in {list, dict}:
                stack.append((element, left - 1))
