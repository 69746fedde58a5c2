"""The wire form of a batch and of the reply to it. Pure: bytes in, bytes out.

    batch   u32 header length | msgpack header | padding | inline tensors, input by input, in each the rows in order
    reply   u8 kind (0) | u32 header length | msgpack header | padding | inline tensors, output by output
    given up by the queue: u8 kind (1) | batch name
    read by no worker: u8 kind (2) | batch name

The padding lets the tensors begin at a multiple of ALIGN_BYTES, so that they are used where they lie.

Both headers start with a format number. Gateways write the newest format of batches that all workers of a version read, as
their records say, and each batch says which formats of replies its gateway reads. What a newer release appends to a
header without another number is not read. A tensor lies inline or in a shared memory segment (its place). Requests of
one batch have equal shapes but for their rows, so a whole input is one contiguous array that can run without a copy.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import msgpack

#: the formats that this release reads and writes, ascending
BATCH_FORMATS: tuple[int, ...] = (3,)
REPLY_FORMATS: tuple[int, ...] = (3,)
KIND_REPLY = 0
KIND_GIVEN_UP = 1
KIND_UNREADABLE = 2
ALIGN_BYTES = 8  # of the largest element
AGAIN = (
    "again"  # in place of an error's code: the request did not fit into the reply of its batch and runs again, alone
)
#: in place of an error's code: the run took longer than any should, and was ended; its like is refused for a while
ENDLESS = "endless"
ABSENT = (-1,)  # in place of the shape of an optional input that the requests did not bring
_U32 = struct.Struct("<I")
_KIND_U32 = struct.Struct("<BI")
_PADDING = tuple(bytes(-length % ALIGN_BYTES) for length in range(ALIGN_BYTES))  # by length before it, mod ALIGN_BYTES
_UNREADABLE = (struct.error, msgpack.UnpackException, TypeError, IndexError)  # beside ValueError
_pack = msgpack.Packer(use_bin_type=True).pack


class Place(NamedTuple):
    """Bytes in a shared memory segment."""

    segment: str
    offset: int
    size_bytes: int


class BatchInput(NamedTuple):
    """One input of a batch. `inner`: the shape without the rows (the whole shape when the version does not batch).

    `size_bytes`: of all requests together. `sizes`: per request, only for BYTES, whose elements differ in length.
    `place`: where it lies; None: inline.
    """

    inner: tuple[int, ...]
    size_bytes: int
    sizes: list[int] | None
    place: Place | None


class BatchHeader(NamedTuple):
    """What a worker needs to know of a batch. Times are milliseconds on Redis' clock.

    `rows`: per request. `deadlines_ms`: per request. `inputs`: in the signature's order. `room`: a place for each
    output, in the signature's order, where the worker may leave it; None: inline. `replies`: reply list of the gateway.
    `blob`: name of the key that holds the inline tensors when they are too large for a script; "": they follow.
    `probe`: nobody asked for it but the gateway itself. `reply_formats`: that the gateway reads.
    """

    name: str
    replies: bytes
    created_ms: float
    rows: list[int]
    deadlines_ms: list[float]
    inputs: list[BatchInput]
    room: list[Place | None]
    blob: str
    probe: bool = False
    reply_formats: tuple[int, ...] = REPLY_FORMATS


class ReplyOutput(NamedTuple):
    """One output of a reply, for the requests that did not fail, in order. Fields as in BatchInput."""

    inner: tuple[int, ...]
    size_bytes: int
    sizes: list[int] | None
    place: Place | None


class ReplyHeader(NamedTuple):
    """What came of a batch. Times in seconds. `failures`: request's position -> [code, message].

    `queue_s`: from the batch's creation to the start of its run; `input_s`, `infer_s`, `output_s`: merging its inputs with
    others', running, and giving each batch its outputs. `run_rows`: rows of the run that this batch was part of. `runs`:
    rows of each run of the model that succeeded, in one of the replies to those who shared them; [] in the others.
    `blob`: as in BatchHeader. `attempt`: of the lease; from the second on, another worker may still be at the batch.
    """

    name: str
    worker: str
    queue_s: float
    input_s: float
    infer_s: float
    output_s: float
    run_rows: int
    runs: list[int]
    failures: dict[int, list[str]]
    outputs: list[ReplyOutput]
    blob: str
    attempt: int = 1


class Unreadable(str):
    """The name of a batch that no worker could read."""

    __slots__ = ()


def agreed_format(formats: Sequence[int], readers: Sequence[Collection[int]]) -> int | None:
    """The newest of `formats` that all `readers` read; where there is none, that most of them read; None: nobody reads any.

    Without readers, the newest.
    """
    votes = {number: sum(number in reader for reader in readers) for number in formats}
    best = max(formats, key=lambda number: (votes[number], number))
    return best if votes[best] or not readers else None


def encode_batch(header: BatchHeader, tensors: Sequence[Any], format_: int | None = None) -> bytes:
    """`tensors`: bytes-like parts of the inline inputs, in order (empty when they lie in a blob).

    `format_`: one of BATCH_FORMATS; None: the newest.
    """
    head = _pack((format_ or BATCH_FORMATS[-1], *header))
    length = len(head)
    return b"".join((_U32.pack(length), head, _PADDING[(4 + length) % ALIGN_BYTES], *tensors))


def decode_batch(data: bytes) -> tuple[BatchHeader, memoryview]:
    """Returns the header and the inline bytes. Raises ValueError for what is no batch, or of a format not known here."""
    try:
        fields, inline = _split(memoryview(data), 4, BATCH_FORMATS)
        name, replies, created, rows, deadlines, inputs, room, blob, probe, reply_formats, *_ = fields
        return (
            BatchHeader(
                name,
                replies,
                created,
                rows,
                deadlines,
                [BatchInput(tuple(inner), size, sizes, _place(place)) for inner, size, sizes, place in inputs],
                [_place(place) for place in room],
                blob,
                probe,
                tuple(reply_formats),
            ),
            inline,
        )
    except _UNREADABLE as error:
        raise ValueError(f"not a batch: {error}") from error


def encode_reply(header: ReplyHeader, tensors: Sequence[Any], format_: int | None = None) -> bytes:
    """`tensors`: bytes-like parts of the inline outputs, in order (empty when they lie in a blob).

    `format_`: one of REPLY_FORMATS; None: the newest.
    """
    head = _pack((format_ or REPLY_FORMATS[-1], *header))
    length = len(head)
    return b"".join((_KIND_U32.pack(KIND_REPLY, length), head, _PADDING[(5 + length) % ALIGN_BYTES], *tensors))


def encode_given_up(name: str) -> bytes:
    """In place of a reply to batch `name`: each of its requests is to be tried alone."""
    return bytes([KIND_GIVEN_UP]) + name.encode()


def decode_reply(data: bytes) -> tuple[ReplyHeader, memoryview] | str:
    """Returns the header and the inline bytes, or the name of a batch that the queue gave up (Unreadable: that was
    read by no worker). Raises ValueError.
    """
    try:
        if data[0] == KIND_GIVEN_UP:
            return data[1:].decode()
        if data[0] == KIND_UNREADABLE:
            return Unreadable(data[1:].decode())
        if data[0] != KIND_REPLY:
            raise ValueError(f"a message of kind {data[0]}")
        fields, inline = _split(memoryview(data), 5, REPLY_FORMATS)
        name, worker, queue_s, input_s, infer_s, output_s, run_rows, runs, failures, outputs, blob, attempt, *_ = fields
        return (
            ReplyHeader(
                name,
                worker,
                queue_s,
                input_s,
                infer_s,
                output_s,
                run_rows,
                runs,
                failures,
                [ReplyOutput(tuple(inner), size, sizes, _place(place)) for inner, size, sizes, place in outputs],
                blob,
                attempt,
            ),
            inline,
        )
    except _UNREADABLE as error:
        raise ValueError(f"not a reply: {error}") from error


def _split(view: memoryview, start: int, formats: Sequence[int]) -> tuple[list[Any], memoryview]:
    """The header that begins at `start`, after its length, and what follows the padding behind it."""
    end = start + _U32.unpack_from(view, start - 4)[0]
    fields: Any = msgpack.unpackb(view[start:end], strict_map_key=False)
    if not isinstance(fields, list) or not fields:
        raise ValueError("no header")
    if fields[0] not in formats:
        raise ValueError(f"its format is {fields[0]!r}, and this release reads {', '.join(map(str, formats))}")
    return fields[1:], view[end + -end % ALIGN_BYTES :]


def _place(fields: list[Any] | None) -> Place | None:
    return None if fields is None else Place(*fields)
