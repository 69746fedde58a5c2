"""Reads the parts of a multipart/form-data body that is in memory as a whole. Pure."""

from __future__ import annotations

from millstream.gateway.http.multipart import MultipartReader, Sink
from millstream.services.errors import invalid

PARTS_MAX = 64


def parts_of(content_type: str, body: bytes) -> dict[str, bytes]:
    """Return each part's bytes, by name. Raises Failure(INVALID) for a form that is broken or has too many parts."""
    pieces: dict[str, list[bytes]] = {}

    def open_part(name: str) -> Sink:
        if len(pieces) == PARTS_MAX:
            raise invalid(f"the form has more than {PARTS_MAX} parts")
        pieces[name] = []
        return pieces[name].append

    reader = MultipartReader(content_type, open_part)
    reader.feed(body)
    reader.close()
    return {name: b"".join(of_part) for name, of_part in pieces.items()}
