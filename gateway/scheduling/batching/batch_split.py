"""Splits a batch whose requests are too large to travel together. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from millstream.gateway.scheduling.request import Request


def parts_within(batch: list[Request], bytes_max: int) -> Iterator[list[Request]]:
    """Yield the requests of `batch`, in order, in parts of at most `bytes_max` bytes or of one request."""
    part: list[Request] = []
    free_bytes = bytes_max
    for request in batch:
        if part and request.permit_bytes > free_bytes:
            yield part
            part, free_bytes = [], bytes_max
        part.append(request)
        free_bytes -= request.permit_bytes
    yield part
