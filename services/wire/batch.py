"""The wire form of a batch, of the reply to it, and of the messages of direct dispatch. Pure: bytes in, bytes out.

    batch   u32 header length | u8 format | header | padding | inline tensors: input by input, rows in order
    reply   u8 kind (0) | u32 header length | u8 format | header | padding | inline tensors: output by output
    given up by the queue: u8 kind (1) | batch name
    unreadable for all workers: u8 kind (2) | batch name

A header is a MessagePack array of the fields of a class below. The padding aligns the tensors to ALIGN_BYTES, so that
they are used without a copy.

The format stands before the header: the header of another format is not read. Gateways write the newest batch format
that all workers of a version read, according to their records, and each batch lists the reply formats that its gateway
reads. Fields that a newer release appends to a header without a new number are ignored. A tensor is inline or in shared
memory. Requests of a batch have equal shapes except for their rows, so a whole input is one contiguous array that can
run without a copy.

Direct dispatch, between a gateway and a worker on its host:

    gateway ─> worker   batch    u32 term | u16 length of the lane | lane | the batch
    worker ─> gateway   attach   u8 kind (3) | MessagePack [term, pool, worker]
                        detach   u8 kind (4) | MessagePack [term, names of batches that it will answer, writing]
                        return   u8 kind (5) | MessagePack [name of a batch that must take the queue, seconds]

A term is the time between an attach and the next detach; the worker numbers them. Messages of one direction keep their
order. So a gateway that reads a detach knows what the worker took: all other batches of the term never run. Replies and
batches that are given up have the kinds above.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import Any

import msgspec

#: The formats that this release reads and writes, ascending.
BATCH_FORMATS: tuple[int, ...] = (4,)
REPLY_FORMATS: tuple[int, ...] = (4,)
KIND_REPLY = 0
KIND_GIVEN_UP = 1
KIND_UNREADABLE = 2
ALIGN_BYTES = 8  # size of the largest element
INLINE_BYTES_MAX = 256 * 1024  # larger inline tensors bypass the queue's scripts, in a key of their own (a blob)
#: Instead of an error code: the request runs again, alone. It did not fit into the reply of its batch; or, whether it
#: was alone or not, its run left the worker to others.
AGAIN = "again"
NO_ROOM = "there was no room in the reply of its batch"  # the message with AGAIN in the first case
#: Instead of an error code: the run took far too long and was terminated; equal requests are refused for a while.
ENDLESS = "endless"
ABSENT = (-1,)  # instead of the shape of an optional input that the requests do not have
_BATCH_START = struct.Struct("<IB")
_REPLY_START = struct.Struct("<BIB")
PADDING = tuple(bytes(-length % ALIGN_BYTES) for length in range(ALIGN_BYTES))  # by length before it, mod ALIGN_BYTES
#: errors of garbled bytes; a ValueError of our own keeps its message
UNREADABLE = (struct.error, msgspec.MsgspecError, UnicodeDecodeError, IndexError, RecursionError)
_pack = msgspec.msgpack.Encoder().encode


# No header is part of a reference cycle: the garbage collector need not visit them (`gc=False`).
class ShmSlice(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Bytes in a shared memory segment."""

    segment: str
    offset: int
    size_bytes: int


class BatchInput(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One input of a batch."""

    inner: tuple[int, ...]  # shape without the rows; the whole shape when the version does not batch
    size_bytes: int  # of all requests together
    sizes: list[int] | None  # bytes per request, only for BYTES, whose elements differ in length
    shm: ShmSlice | None  # where it is in shared memory; None: inline


class BatchHeader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """What a worker needs to know about a batch. Times are milliseconds on the Redis clock."""

    name: str
    replies: bytes  # reply list of the gateway
    created_ms: float
    rows: list[int]  # per request
    deadlines_ms: list[float]  # per request
    inputs: list[BatchInput]  # in the signature's order
    output_slots: list[ShmSlice | None]  # in the signature's order: where the worker may write an output; None: inline
    blob: str  # name of the key with the inline tensors if they are too large for a script; "": they follow
    probe: bool = False  # a readiness probe of the gateway itself
    reply_formats: tuple[int, ...] = REPLY_FORMATS  # reply formats that the gateway reads
    told: list[bytes] = []  # per request, JSON of what its caller said beside the tensors; []: the model is not told
    window: int = 0  # bytes of parts of the answer that may be on their way (wire/part_messages.py); 0: one reply


class ReplyOutput(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One output of a reply, for the requests that did not fail, in order. Fields as in BatchInput."""

    inner: tuple[int, ...]
    size_bytes: int
    sizes: list[int] | None
    shm: ShmSlice | None


class ReplyHeader(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The result of a batch. Times are in seconds."""

    name: str
    worker: str
    queue_s: float  # from the creation of the batch to the start of its run
    input_s: float  # merging its inputs with those of other batches
    infer_s: float  # running the model
    output_s: float  # splitting the outputs
    run_rows: int  # rows of the run that this batch was part of
    runs: list[int]  # rows of each successful run of the model, in one of the replies that share them; [] in the others
    failures: dict[int, list[str]]  # position of a request -> [code, message]
    outputs: list[ReplyOutput]
    blob: str  # as in BatchHeader
    attempt: int = 1  # of the lease; from the second on, another worker may still run the batch
    form: str = ""  # key of the compiled form that made the run; "": the version's own file


_read_batch = msgspec.msgpack.Decoder(BatchHeader).decode
_read_reply = msgspec.msgpack.Decoder(ReplyHeader).decode


class Unreadable(str):
    """The name of a batch that no worker could read."""

    __slots__ = ()


def too_large(size_bytes: int, bytes_max: int) -> str:
    """Return the error message for a request whose outputs are too large."""
    return (
        f"the outputs of the request take {size_bytes} bytes, more than the {bytes_max} that a reply may have: "
        "ask for less in one request, or raise MILLSTREAM_REPLY_BYTES_MAX"
    )


def agreed_format(formats: Sequence[int], readers: Sequence[Collection[int]]) -> int | None:
    """Return the newest of `formats` that all `readers` read, else the one that most of them read.

    Without readers it is the newest; None if no reader reads any.
    """
    votes = {number: sum(number in reader for reader in readers) for number in formats}
    best = max(formats, key=lambda number: (votes[number], number))
    return best if votes[best] or not readers else None


def encode_batch(header: BatchHeader, tensors: Sequence[Any], format_: int | None = None) -> bytes:
    """Encode a batch in one of BATCH_FORMATS, the newest by default.

    `tensors` are bytes-like parts of the inline inputs, in order (empty when they are in a blob).
    """
    head = _pack(header)
    length = len(head)
    start = _BATCH_START.pack(length, format_ or BATCH_FORMATS[-1])
    return b"".join((start, head, PADDING[(_BATCH_START.size + length) % ALIGN_BYTES], *tensors))


def decode_batch(data: bytes) -> tuple[BatchHeader, memoryview]:
    """Return the header and the inline bytes. Raises ValueError if it is no batch, or its format is unknown."""
    try:
        length, format_ = _BATCH_START.unpack_from(data)
        head, inline = split(data, _BATCH_START.size, length, format_, BATCH_FORMATS)
        return _read_batch(head), inline
    except UNREADABLE as error:
        raise ValueError(f"not a batch: {error}") from error


def encode_reply(header: ReplyHeader, tensors: Sequence[Any], format_: int | None = None) -> bytes:
    """Encode a reply in one of REPLY_FORMATS, the newest by default.

    `tensors` are bytes-like parts of the inline outputs, in order (empty when they are in a blob).
    """
    head = _pack(header)
    length = len(head)
    start = _REPLY_START.pack(KIND_REPLY, length, format_ or REPLY_FORMATS[-1])
    return b"".join((start, head, PADDING[(_REPLY_START.size + length) % ALIGN_BYTES], *tensors))


def encode_given_up(name: str) -> bytes:
    """Encode the message, sent instead of a reply, that each request of batch `name` is to be tried alone."""
    return bytes([KIND_GIVEN_UP]) + name.encode()


def decode_reply(data: bytes) -> tuple[ReplyHeader, memoryview] | str:
    """Return the header and the inline bytes, or the name of a batch that the queue gave up. Raises ValueError.

    The name is an `Unreadable` if no worker could read the batch.
    """
    try:
        if data[0] == KIND_GIVEN_UP:
            return data[1:].decode()
        if data[0] == KIND_UNREADABLE:
            return Unreadable(data[1:].decode())
        if data[0] != KIND_REPLY:
            raise ValueError(f"a message of kind {data[0]}")
        _, length, format_ = _REPLY_START.unpack_from(data)
        head, inline = split(data, _REPLY_START.size, length, format_, REPLY_FORMATS)
        return _read_reply(head), inline
    except UNREADABLE as error:
        raise ValueError(f"not a reply: {error}") from error


def split(data: bytes, start: int, length: int, format_: int, formats: Sequence[int]) -> tuple[memoryview, memoryview]:
    """Return the header of `length` bytes that begins at `start`, and the bytes after the padding."""
    if format_ not in formats:
        raise ValueError(f"its format is {format_}, and this release reads {', '.join(map(str, formats))}")
    view, end = memoryview(data), start + length
    return view[start:end], view[end + -end % ALIGN_BYTES :]


class _Item(msgspec.Struct, array_like=True, gc=False):
    lane: str
    entry: str
    batch: msgspec.Raw
    attempt: str
    tried: tuple[str, ...] = ()  # workers that could not read the batch


_read = msgspec.msgpack.Decoder(_Item).decode
#: Bytes of the head of a string, by its first byte. Source: MessagePack specification, "str format family".
_HEAD_BYTES = {**dict.fromkeys(range(0xA0, 0xC0), 1), 0xD9: 2, 0xDA: 3, 0xDB: 5}


def read_item(item: bytes) -> tuple[str, bytes, bytes, int, tuple[str, ...]]:
    """Return lane, id, batch and attempt of a leased entry, and the workers that could not read the batch.

    Raises ValueError.
    """
    try:
        read = _read(item)
        batch = memoryview(read.batch)
        # A copy: the tensors of the batch are aligned from its first byte on.
        return read.lane, read.entry.encode(), bytes(batch[_HEAD_BYTES[batch[0]] :]), int(read.attempt), read.tried
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, KeyError) as error:
        raise ValueError(f"not an item of an inbox: {error}") from error


KIND_ATTACH = 3
KIND_DETACH = 4
KIND_RETURN = 5
_HEAD = struct.Struct("<IH")
TERM_MAX = (1 << 32) - 1
_pack = msgspec.msgpack.Encoder().encode


class Attach(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The worker takes batches of its pool from this gateway, until it detaches."""

    term: int
    pool: str
    worker: str


class Detach(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The worker takes no more batches. It answers those in `taken`; the others of the term never run.

    With `writing`, one of them runs until the process ends: it has no answer, but may write into its shared memory.
    """

    term: int
    taken: list[str]
    writing: bool = False


class Return(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A batch that the worker cannot answer directly. For `pause_s` seconds, batches of its lane take the queue."""

    name: str
    pause_s: float


_read_attach = msgspec.msgpack.Decoder(Attach).decode
_read_detach = msgspec.msgpack.Decoder(Detach).decode
_read_return = msgspec.msgpack.Decoder(Return).decode


def batch_head(term: int, lane: str) -> bytes:
    """Return what stands before a batch in its message."""
    name = lane.encode()
    return _HEAD.pack(term, len(name)) + name


def read_batch(data: bytes) -> tuple[int, str, bytes]:
    """Return term, lane and batch. Raises ValueError."""
    try:
        term, length = _HEAD.unpack_from(data)
        end = _HEAD.size + length
        # A copy: the tensors of the batch are aligned from its first byte on.
        return term, data[_HEAD.size : end].decode(), data[end:]
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"not a batch: {error}") from error


def attach_message(term: int, pool: str, worker: str) -> bytes:
    """Encode an Attach."""
    return bytes([KIND_ATTACH]) + _pack(Attach(term, pool, worker))


def detach_message(term: int, taken: Sequence[str], *, writing: bool = False) -> bytes:
    """Encode a Detach."""
    return bytes([KIND_DETACH]) + _pack(Detach(term, list(taken), writing))


def return_message(name: str, pause_s: float) -> bytes:
    """Encode a Return."""
    return bytes([KIND_RETURN]) + _pack(Return(name, pause_s))


def read_control(data: bytes) -> Attach | Detach | Return:
    """Return the worker's message. Raises ValueError."""
    body = memoryview(data)[1:]
    try:
        if data[0] == KIND_ATTACH:
            return _read_attach(body)
        if data[0] == KIND_DETACH:
            return _read_detach(body)
        if data[0] == KIND_RETURN:
            return _read_return(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a message of a worker: {error}") from error
    raise ValueError(f"a message of kind {data[0]}")


def is_control(data: bytes) -> bool:
    """Return whether a message of a worker is one of this module, and no reply."""
    return KIND_ATTACH <= data[0] <= KIND_RETURN
