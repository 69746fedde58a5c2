"""inbound: what all connections of a gateway are receiving now, in bytes. Bounded before anything is admitted."""

from __future__ import annotations


class Inbound:
    """Counts the bodies that are not yet with the infer handler. Who would go over `bytes_max` is refused."""

    __slots__ = ("bytes", "bytes_max")

    def __init__(self, bytes_max: int) -> None:
        self.bytes = 0
        self.bytes_max = bytes_max
