"""Received TLS records go to OpenSSL one at a time, however they were cut into segments."""

from __future__ import annotations

import ssl

import pytest

from millstream.gateway.connection.tls_connection import ReceivedRecords

HANDSHAKE, DATA = 22, 23


def record(kind: int, size_bytes: int) -> bytes:
    return bytes([kind, 3, 3]) + size_bytes.to_bytes(2, "big") + bytes(index % 251 for index in range(size_bytes))


RECORDS = [record(DATA, 300), record(HANDSHAKE, 0), record(HANDSHAKE, 22), record(DATA, 1), record(DATA, 700)]


@pytest.mark.parametrize("segment_bytes", [1, 2, 4, 5, 6, 7, 27, 300, 305, 306, 5000])
def test_each_record_comes_alone_and_whole(segment_bytes: int) -> None:
    sent = b"".join(RECORDS)
    incoming = ssl.MemoryBIO()
    records = ReceivedRecords(incoming)
    read = []
    for at in range(0, len(sent), segment_bytes):
        records.add(sent[at : at + segment_bytes])
        while records.pass_on():
            read.append(incoming.read())
    assert read == RECORDS
    assert not records.pass_on()
    assert not incoming.read()


def test_segments_that_come_before_the_last_is_read_are_kept() -> None:
    incoming = ssl.MemoryBIO()
    records = ReceivedRecords(incoming)
    sent = b"".join(RECORDS)
    records.add(sent[:400])
    assert records.pass_on()
    records.add(sent[400:900])
    records.add(sent[900:])
    while records.pass_on():
        pass
    assert incoming.read() == sent


@pytest.mark.parametrize(
    "garbage",
    [b"GET / HTTP/1.1\r\n\r\n", bytes([DATA, 3, 3]) + (16 * 1024 + 2049).to_bytes(2, "big")],
    ids=["no TLS", "too large"],
)
def test_what_is_no_record_goes_at_once(garbage: bytes) -> None:
    incoming = ssl.MemoryBIO()
    records = ReceivedRecords(incoming)
    records.add(RECORDS[0] + garbage)
    assert records.pass_on()
    assert incoming.read() == RECORDS[0]
    assert records.pass_on()
    assert incoming.read() == garbage
    assert not records.pass_on()
