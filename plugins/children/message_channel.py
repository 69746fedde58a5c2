"""Messages between a process and the one that holds an instance: a header in JSON, and tensors behind it.

[bytes of the header, bytes behind it] header, tensors up to INLINE_BYTES_MAX together; larger ones are in a SharedFile
Both sides use one stream socket and two files in memory, one for each direction, which the child inherits: it needs no
right to receive descriptors. The child may run in an environment of its own: standard library alone.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

#: tensors of a message up to this many bytes together are in the message itself: two copies cost less than a mapping
INLINE_BYTES_MAX = 64 << 10
HEADER_BYTES_MAX = 4 << 20
#: the same where several requests run at once: each message has its tensors in itself
STREAM_BYTES_MAX = 64 << 20
_HEAD = struct.Struct("<II")
_LENGTH = struct.Struct("<I")
_INLINE = -1
_ALIGNED = 64  # bytes; where a tensor begins in a segment
_READ_BYTES = 1 << 20

Buffer = bytes | bytearray | memoryview


class ClosedError(Exception):
    """The other side has closed the connection."""


class BrokenMessageError(Exception):
    """The other side sent what is no message."""


class TensorData(NamedTuple):
    """A tensor of a message.

    Args:
        datatype: of the v2 protocol.
        data: row-major and little-endian; elements of BYTES have their lengths before them.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer


class Message(NamedTuple):
    """What one side says. `header`: JSON, without what describes the tensors. `ends`: of the segment that it used."""

    header: dict[str, Any]
    tensors: Sequence[TensorData] = ()
    ends: int = 0


class SharedFile:
    """A file in memory that both sides map and one writes to. It grows; the side that made it has sealed its size
    against shrinking, so that no mapping of it can lose its pages.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._map: mmap.mmap | None = None
        self._size_bytes = 0

    def writable(self, size_bytes: int) -> memoryview:
        """Return its content, of `size_bytes` at least. Raises OSError if it cannot grow so far."""
        if size_bytes > os.fstat(self.descriptor).st_size:
            os.ftruncate(self.descriptor, 1 << (size_bytes - 1).bit_length())
        return self.readable(size_bytes)

    def readable(self, size_bytes: int) -> memoryview:
        """Return its content. Raises BrokenMessageError if it is shorter than `size_bytes`."""
        if self._map is None or self._size_bytes < size_bytes:
            real = os.fstat(self.descriptor).st_size
            if real < size_bytes:
                raise BrokenMessageError("a tensor lies outside of the shared memory")
            self._map = mmap.mmap(self.descriptor, real)  # views of the mapping before keep it
            self._size_bytes = real
        return memoryview(self._map)

    def close(self) -> None:
        self._map = None
        os.close(self.descriptor)


class Channel:
    """One end of the connection.

    Args:
        descriptor: of the socket.
        sent: the segment that this side writes to.
        received: the segment that the other side writes to.
    """

    def __init__(self, descriptor: int, sent: SharedFile, received: SharedFile) -> None:
        self._descriptor = descriptor
        self._sent = sent
        self._received = received
        self.inline_bytes_max = INLINE_BYTES_MAX

    def send(self, header: dict[str, Any], tensors: Sequence[TensorData] = (), begin: int = 0) -> None:
        """Send a message. Its larger tensors are written to the segment from `begin` on.

        Raises ClosedError, OSError if the segment cannot grow.
        """
        sizes = [len(memoryview(tensor.data).cast("B")) for tensor in tensors]
        inline = sum(sizes) <= self.inline_bytes_max
        offsets = [_INLINE] * len(sizes) if inline else _placed(sizes, begin)
        listed = [[*tensor[:3], size, at] for tensor, size, at in zip(tensors, sizes, offsets, strict=True)]
        head = json.dumps({**header, "tensors": listed} if listed else header, separators=(",", ":")).encode()
        if inline:
            bodies = [tensor.data for tensor in tensors]
            self._write(b"".join((_HEAD.pack(len(head), sum(sizes)), head, *bodies)))
            return
        content = self._sent.writable(offsets[-1] + sizes[-1])
        for tensor, size, at in zip(tensors, sizes, offsets, strict=True):
            content[at : at + size] = memoryview(tensor.data).cast("B")
        self._write(_HEAD.pack(len(head), 0) + head)

    def receive(self) -> Message:
        """Return the next message, whose tensors are valid until the other side sends again.

        Raises ClosedError, BrokenMessageError.
        """
        head_bytes, inline_bytes = _HEAD.unpack(self._read(_HEAD.size))
        if head_bytes > HEADER_BYTES_MAX or inline_bytes > self.inline_bytes_max:
            raise BrokenMessageError("a message is too long")
        body = self._read(head_bytes + inline_bytes)
        try:
            header = json.loads(body[:head_bytes])
            listed = [_Listed(*one) for one in header.pop("tensors", ())]
            return self._message(header, listed, memoryview(body)[head_bytes:])
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise BrokenMessageError(f"a message cannot be read: {str(error)[:200]}") from error

    def _message(self, header: dict[str, Any], listed: Sequence[_Listed], inline: memoryview) -> Message:
        tensors, offset, end = [], 0, 0
        for one in listed:
            if min(one.size, *one.shape, 0) < 0:
                raise ValueError("a size is negative")
            if one.at == _INLINE:
                data = inline[offset : offset + one.size]
                offset += one.size
            else:
                end = max(end, one.at + one.size)
                data = self._received.readable(one.at + one.size)[one.at : one.at + one.size]
            if len(data) != one.size:
                raise ValueError("a tensor is cut off")
            tensors.append(TensorData(str(one.name), str(one.datatype), tuple(map(int, one.shape)), data))
        return Message(header, tensors, end)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:  # EPIPE, ECONNRESET, EBADF: the other side is gone, or closed what it has
            raise ClosedError from error

    def _read(self, size: int) -> bytearray:
        """Return `size` bytes, which may be written to: arrays are made on them."""
        found = bytearray()
        while len(found) < size:
            try:
                piece = os.read(self._descriptor, min(size - len(found), _READ_BYTES))
            except OSError as error:
                raise ClosedError from error
            if not piece:
                raise ClosedError
            found += piece
        return found


class _Listed(NamedTuple):
    name: str
    datatype: str
    shape: Sequence[int]
    size: int
    at: int


def _placed(sizes: Iterable[int], begin: int) -> list[int]:
    offsets, at = [], begin
    for size in sizes:
        at = -(-at // _ALIGNED) * _ALIGNED
        offsets.append(at)
        at += size
    return offsets


def encode_elements(elements: Iterable[bytes]) -> bytes:
    """Return the data of a BYTES tensor."""
    return b"".join(part for element in elements for part in (_LENGTH.pack(len(element)), element))


def decode_elements(data: Buffer) -> list[bytes]:
    """Return the elements of a BYTES tensor. Raises ValueError."""
    view, offset, elements = memoryview(data), 0, []
    while offset < len(view):
        if offset + _LENGTH.size > len(view):
            raise ValueError("a length is cut off at the end")
        start = offset + _LENGTH.size
        offset = start + _LENGTH.unpack_from(view, offset)[0]
        if offset > len(view):
            raise ValueError("an element is longer than the bytes that are there")
        elements.append(bytes(view[start:offset]))
    return elements
