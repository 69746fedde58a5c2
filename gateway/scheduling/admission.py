"""Admits requests: a gateway process has a bounded number of requests and bytes in flight.

The permit travels with the request as `permit_bytes` and is released exactly once, when the request is done.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.gateway.scheduling.request import Request
from millstream.services.errors import Code, Failure
from millstream.services.metrics.registry import Counter, Gauge


class Admission:
    """Refuses with UNAVAILABLE (503) when the gateway is full. A full lane refuses by itself (429)."""

    __slots__ = ("_bytes_max", "_gauge", "_refused", "_requests_max", "bytes", "closed", "requests")

    def __init__(self, requests_max: int, bytes_max: int, in_flight: Gauge, refused: Counter) -> None:
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self._gauge = in_flight
        self._refused = refused
        self.requests = 0
        self.bytes = 0
        self.closed = False  # draining: requests in flight are answered, further ones are refused

    def admit(self, request: Request, size_bytes: int) -> None:
        """Give a request its permit. Raises Failure(UNAVAILABLE) with a time after which to retry."""
        if self.requests >= self._requests_max or self.bytes + size_bytes > self._bytes_max or self.closed:
            self._refused.add()
            if self.closed:
                raise Failure(Code.UNAVAILABLE, "the gateway is shutting down: try another one", retry_after_s=1)
            raise Failure(
                Code.UNAVAILABLE,
                f"the gateway is full: {self.requests} requests of {self.bytes} bytes are in flight; try again later",
                retry_after_s=1,
            )
        self.requests += 1
        self.bytes += size_bytes
        request.permit_bytes = size_bytes
        self._gauge.set(self.requests)

    def release(self, requests: Sequence[Request]) -> None:
        """Release the permits of requests."""
        self.requests -= len(requests)
        self.bytes -= sum([request.permit_bytes for request in requests])
        self._gauge.set(self.requests)
