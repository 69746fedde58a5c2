"""Answers DNS queries as the name server of a network of containers does: 127.0.0.1 for each known name."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Collection

_A = 1
_NO_SUCH_NAME = 3
_ADDRESS = socket.inet_aton("127.0.0.1")
PACKET_BYTES_MAX = 4096


class NameServer:
    """A name server at 127.0.0.1:53 of the network in which it is made (RFC 1035, one question in each query)."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = frozenset(names)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 53))
        self._thread = threading.Thread(target=self._serve, name="name server")
        self._thread.start()

    def close(self) -> None:
        self._socket.sendto(b"", self._socket.getsockname())
        self._thread.join()
        self._socket.close()

    def _serve(self) -> None:
        while True:
            query, sender = self._socket.recvfrom(PACKET_BYTES_MAX)
            if not query:  # from `close`
                return
            self._socket.sendto(answer(query, self._names), sender)


def answer(query: bytes, names: Collection[str]) -> bytes:
    """Return the reply to a query: the address of a known name, nothing for its other records."""
    labels, at = [], 12
    while length := query[at]:
        labels.append(query[at + 1 : at + 1 + length].decode())
        at += 1 + length
    question = query[12 : at + 5]
    kind = struct.unpack("!H", query[at + 1 : at + 3])[0]
    known = ".".join(labels) in names
    answers = [struct.pack("!HHHIH", 0xC00C, _A, 1, 1, len(_ADDRESS)) + _ADDRESS] if known and kind == _A else []
    flags = 0x8580 | (0 if known else _NO_SUCH_NAME)  # an authoritative reply
    return query[:2] + struct.pack("!HHHHH", flags, 1, len(answers), 0, 0) + question + b"".join(answers)
