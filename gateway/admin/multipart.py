"""A multipart/form-data upload, parsed as it comes: the bytes of `model` flow on, the small `config` part is kept."""

from __future__ import annotations

from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from millstream.services.errors import Code, Failure, invalid

CONFIG_BYTES_MAX = 64 * 1024

_MODEL, _CONFIG = "model", "config"


def is_form(content_type: str) -> bool:
    """Whether a body of this Content-Type is a form; anything else is the model's bytes as they are."""
    return content_type.partition(";")[0].strip().lower() == "multipart/form-data"


class MultipartUpload:
    """Feed it the body's chunks; it gives back the model's bytes in them.

    Raises Failure(INVALID) for a form that is broken, incomplete or has other parts; TOO_LARGE for a long config.
    """

    def __init__(self, content_type: str) -> None:
        _, options = parse_options_header(content_type)
        boundary = options.get(b"boundary")
        if not boundary:
            raise invalid("multipart/form-data without a boundary in its Content-Type")
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
        except FormParserError as exc:
            raise invalid(f"multipart body: {exc}") from None
        self._seen: set[str] = set()
        self._part = ""
        self._disposition = b""
        self._header = (bytearray(), bytearray())
        self._config = bytearray()
        self._pieces: list[bytes] = []
        self._ended = False

    @property
    def config(self) -> bytes | None:
        """The `config` part, once it has come; None: there was none so far."""
        return bytes(self._config) if _CONFIG in self._seen else None

    def feed(self, chunk: bytes) -> list[bytes]:
        """The pieces of the model's file in `chunk`, in order."""
        self._pieces = []
        try:
            self._parser.write(chunk)
        except FormParserError as exc:
            raise invalid(f"multipart body: {exc}") from None
        return self._pieces

    def close(self) -> None:
        """Call at the end of the body."""
        if not self._ended:
            raise invalid("the multipart body ends before its last boundary")
        if _MODEL not in self._seen:
            raise invalid("the form has no part 'model' (the model's file)")

    def _part_begin(self) -> None:
        self._disposition = b""
        self._header = (bytearray(), bytearray())

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header[0].extend(data[start:end])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._header[1].extend(data[start:end])

    def _header_end(self) -> None:
        name, value = self._header
        if name.lower() == b"content-disposition":
            self._disposition = bytes(value)
        self._header = (bytearray(), bytearray())

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._disposition)
        self._part = options.get(b"name", b"").decode("utf-8", "replace")
        if self._part not in {_MODEL, _CONFIG}:
            raise invalid(
                f"the form has a part '{self._part[:80]}': only 'model' (a file) and 'config' (JSON) are known"
            )
        if self._part in self._seen:
            raise invalid(f"the form has more than one part '{self._part}'")
        self._seen.add(self._part)

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._part == _MODEL:
            self._pieces.append(data[start:end])
            return
        if len(self._config) + end - start > CONFIG_BYTES_MAX:
            raise Failure(Code.TOO_LARGE, f"the part 'config' is larger than the limit of {CONFIG_BYTES_MAX} bytes")
        self._config.extend(data[start:end])

    def _end(self) -> None:
        self._ended = True
