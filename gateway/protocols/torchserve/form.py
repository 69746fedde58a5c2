"""The parts of a multipart/form-data body that is in memory as a whole. Pure."""

from __future__ import annotations

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from millstream.services.errors import invalid

PARTS_MAX = 64


def parts_of(content_type: str, body: bytes) -> dict[str, bytes]:
    """Name of each part -> its bytes. Raises Failure(INVALID): broken, or a name twice."""
    _, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if not boundary:
        raise invalid("multipart/form-data without a boundary in its Content-Type")
    parts = _Parts()
    try:
        parser = MultipartParser(
            boundary,
            {
                "on_part_begin": parts.begin,
                "on_header_field": parts.header_field,
                "on_header_value": parts.header_value,
                "on_header_end": parts.header_end,
                "on_headers_finished": parts.headers_finished,
                "on_part_data": parts.data,
                "on_end": parts.end,
            },
        )
        parser.write(body)
    except FormParserError as error:
        raise invalid(f"multipart body: {error}") from None
    if not parts.ended:
        raise invalid("the multipart body ends before its last boundary")
    return {name: b"".join(pieces) for name, pieces in parts.found.items()}


class _Parts:
    """What the parser has come by."""

    def __init__(self) -> None:
        self.found: dict[str, list[bytes]] = {}
        self.ended = False
        self._pieces: list[bytes] = []
        self._field = b""
        self._value = b""
        self._disposition = b""

    def begin(self) -> None:
        self._disposition = self._field = self._value = b""

    def header_field(self, data: bytes, start: int, end: int) -> None:
        self._field += data[start:end]

    def header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]  # the parser has a limit on headers

    def header_end(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._disposition = self._value
        self._field = self._value = b""

    def headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        name = options.get(b"name", b"").decode("utf-8", "replace")
        if name in self.found:
            raise invalid(f"the form has more than one part '{name[:80]}'")
        if len(self.found) == PARTS_MAX:
            raise invalid(f"the form has more than {PARTS_MAX} parts")
        self._pieces = self.found[name] = []

    def data(self, data: bytes, start: int, end: int) -> None:
        self._pieces.append(data[start:end])

    def end(self) -> None:
        self.ended = True
