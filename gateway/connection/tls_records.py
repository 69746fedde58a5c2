"""tls_records: received bytes of a connection -> OpenSSL, one TLS record at a time.

OpenSSL handles all records that carry no data in one call, until one with data comes. A read of 256 KiB may contain
9,700 changes of keys, which take some 0.1 s: no other connection is served meanwhile. So it gets one at a time.
Sources: RFC 8446 5.1 and RFC 5246 6.2.1 (the header of a record).
"""

from __future__ import annotations

import ssl

_HEADER_BYTES = 5  # type, version (2), length (2)
_MAJOR_VERSION = 3
#: of a record, header included: RFC 5246 6.2.3; with TLS 1.3 it is less
_RECORD_BYTES_MAX = _HEADER_BYTES + 16 * 1024 + 2048


class ReceivedRecords:
    """Records of one connection, which wait until OpenSSL may read them.

    Args:
        incoming: What OpenSSL reads.
    """

    __slots__ = ("_at", "_incoming", "_missing_bytes", "_waiting")

    def __init__(self, incoming: ssl.MemoryBIO) -> None:
        self._incoming = incoming
        self._waiting = b""
        self._at = 0  # of the first byte of `_waiting` that `incoming` lacks
        self._missing_bytes = 0  # of the record that has partly gone to `incoming`; 0: a header is next

    def add(self, data: bytes) -> None:
        """Take received bytes."""
        self._waiting = self._waiting[self._at :] + data
        self._at = 0

    def pass_on(self) -> bool:
        """Give OpenSSL the next bytes, up to the end of a record. Return whether that record is complete.

        What is no record goes as a whole and counts as complete, for OpenSSL to refuse.
        """
        waiting, at = self._waiting, self._at
        left_bytes = len(waiting) - at
        if not self._missing_bytes:
            if left_bytes < _HEADER_BYTES:
                return False
            record_bytes = _HEADER_BYTES + int.from_bytes(waiting[at + 3 : at + 5], "big")
            if waiting[at + 1] != _MAJOR_VERSION or record_bytes > _RECORD_BYTES_MAX:
                record_bytes = left_bytes
            self._missing_bytes = record_bytes
        part_bytes = min(self._missing_bytes, left_bytes)
        self._incoming.write(memoryview(waiting)[at : at + part_bytes])
        self._at = at + part_bytes
        self._missing_bytes -= part_bytes
        if part_bytes == left_bytes:
            self._waiting, self._at = b"", 0
        return not self._missing_bytes
