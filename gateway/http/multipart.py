"""Reads a multipart/form-data body chunk by chunk, and passes the bytes of each part to the caller's sink.

Content-Type ─> boundary; chunk ─> feed ─> (a part begins) ─> open_part(name) ─> sink(bytes)
"""

from __future__ import annotations

from collections.abc import Callable

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from millstream.services.errors import invalid

_MEDIA_TYPE = "multipart/form-data"
_NAME_CHARACTERS_MAX = 80  # of a part's name in a message

Sink = Callable[[bytes], object]


def is_form(content_type: str) -> bool:
    """Whether a body of this Content-Type is a form."""
    return content_type.partition(";")[0].strip().lower() == _MEDIA_TYPE


class MultipartReader:
    """Reads one form.

    Args:
        content_type: the header's value, with the boundary.
        open_part: called with the name of a part that begins; returns the sink for its bytes; may raise Failure.

    Raises:
        Failure: INVALID, from the constructor, `feed` and `close`, for a form that is broken, ends early, or has two
            parts of one name.
    """

    def __init__(self, content_type: str, open_part: Callable[[str], Sink]) -> None:
        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if not boundary:
            raise invalid(f"{_MEDIA_TYPE} without a boundary in its Content-Type")
        self._open_part = open_part
        self._names: set[str] = set()
        self._sink: Sink | None = None
        self._disposition = b""
        self._field = bytearray()
        self._value = bytearray()  # the parser bounds headers
        self._ended = False
        try:
            self._parser = MultipartParser(
                boundary,
                {
                    "on_part_begin": self._part_begin,
                    "on_header_field": self._header_field,
                    "on_header_value": self._header_value,
                    "on_header_end": self._header_end,
                    "on_headers_finished": self._headers_finished,
                    "on_part_data": self._part_data,
                    "on_end": self._end,
                },
            )
        except FormParserError as error:
            raise _broken(error) from None

    def feed(self, chunk: bytes) -> None:
        """Read the next chunk of the body."""
        try:
            self._parser.write(chunk)
        except FormParserError as error:
            raise _broken(error) from None

    def close(self) -> None:
        """Check that the form is complete. Call it at the end of the body."""
        if not self._ended:
            raise invalid("the multipart body ends before its last boundary")

    def _part_begin(self) -> None:
        self._disposition = b""
        self._header_done()

    def _header_done(self) -> None:
        self._field.clear()
        self._value.clear()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = bytes(self._value)
        self._header_done()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name in self._names:
            raise invalid(f"the form has more than one part '{name[:_NAME_CHARACTERS_MAX]}'")
        self._sink = self._open_part(name)
        self._names.add(name)

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        assert self._sink is not None
        self._sink(data[start:end])

    def _end(self) -> None:
        self._ended = True


def _broken(error: FormParserError) -> Exception:
    return invalid(f"multipart body: {error}")
