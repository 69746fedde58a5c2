"""Replies in parts: the messages between the worker that runs a request and the gateway that streams its answer. Pure.

    worker ─> gateway   part      u8 kind (6) | u32 header length | u8 format | header | padding | inline tensors
    gateway ─> worker   taken     u8 kind (7) | MessagePack [name of the batch, ordinal]
                        cancel    u8 kind (8) | MessagePack [name of the batch]
    worker ─> gateway   two-way   u8 kind (9): the first message of a connection that also gets messages
                        fragment  u8 kind (10) | bytes; the last one of a message u8 kind (11) | bytes

A gateway asks for parts by `BatchHeader.window`: how many bytes may be on their way. The worker opens the stream with
part 0, which has no outputs; parts 1, 2, … are answers; the reply to the batch (kind 0, without outputs) ends it. All
take one connection, which keeps their order. `taken` says that the caller has all parts up to an ordinal. A message
that is too long for the connection comes in fragments, with nothing between them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import msgspec

from millstream.services.wire.batch import ALIGN_BYTES, PADDING, REPLY_FORMATS, UNREADABLE, ReplyOutput, split

KIND_PART = 6
KIND_TAKEN = 7
KIND_CANCEL = 8
KIND_TWO_WAY = 9
KIND_FRAGMENT = 10
KIND_LAST_FRAGMENT = 11
TWO_WAY = bytes([KIND_TWO_WAY])
#: of one part, in fragments
PART_BYTES_MAX = 16 << 20
#: what a part without bytes counts in the window: it takes memory, too
PART_BYTES = 64
_START = struct.Struct("<BIB")
_pack = msgspec.msgpack.Encoder().encode


class PartHeader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One part of the answer to the only request of a batch."""

    name: str  # of the batch
    worker: str
    attempt: int  # of the lease
    ordinal: int  # 0: the stream is open; then 1, 2, …
    outputs: list[ReplyOutput]  # as in ReplyHeader, all inline

    @property
    def size_bytes(self) -> int:
        """What it counts in the window of its stream."""
        return PART_BYTES + sum([output.size_bytes for output in self.outputs])


class Taken(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The caller has the parts of a batch up to `ordinal`."""

    name: str
    ordinal: int


class Cancel(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The answer to a batch is not wanted any longer."""

    name: str


_read_part = msgspec.msgpack.Decoder(PartHeader).decode
_read_taken = msgspec.msgpack.Decoder(Taken).decode
_read_cancel = msgspec.msgpack.Decoder(Cancel).decode


def is_of_stream(data: bytes) -> bool:
    """Return whether a message of a worker is one of this module."""
    return bool(data) and KIND_PART <= data[0] <= KIND_LAST_FRAGMENT


def encode_part(header: PartHeader, tensors: Sequence[Any], format_: int) -> bytes:
    """Encode a part in one of REPLY_FORMATS. `tensors`: bytes-like parts of its outputs, in order."""
    head = _pack(header)
    length = len(head)
    start = _START.pack(KIND_PART, length, format_)
    return b"".join((start, head, PADDING[(_START.size + length) % ALIGN_BYTES], *tensors))


def in_fragments(message: bytes, bytes_max: int) -> list[bytes]:
    """Return the messages of at most `bytes_max` as which a message is sent."""
    if len(message) <= bytes_max:
        return [message]
    size = bytes_max - 1
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    return [bytes([KIND_FRAGMENT]) + one for one in pieces[:-1]] + [bytes([KIND_LAST_FRAGMENT]) + pieces[-1]]


def decode_part(data: bytes) -> tuple[PartHeader, memoryview]:
    """Return the header and the inline bytes of a part. Raises ValueError."""
    try:
        _, length, format_ = _START.unpack_from(data)
        head, inline = split(data, _START.size, length, format_, REPLY_FORMATS)
        return _read_part(head), inline
    except UNREADABLE as error:
        raise ValueError(f"not a part of a reply: {error}") from error


def taken_message(name: str, ordinal: int) -> bytes:
    """Encode a Taken."""
    return bytes([KIND_TAKEN]) + _pack(Taken(name, ordinal))


def cancel_message(name: str) -> bytes:
    """Encode a Cancel."""
    return bytes([KIND_CANCEL]) + _pack(Cancel(name))


def read_from_gateway(data: bytes) -> Taken | Cancel:
    """Return what a gateway says of a stream. Raises ValueError."""
    body = memoryview(data)[1:]
    try:
        if data[0] == KIND_TAKEN:
            return _read_taken(body)
        if data[0] == KIND_CANCEL:
            return _read_cancel(body)
    except UNREADABLE as error:
        raise ValueError(f"not a message of a gateway: {error}") from error
    raise ValueError(f"a message of kind {data[0]}")
