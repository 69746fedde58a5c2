"""Requests -> an encoded batch with its tensors in shared memory, inline or in a blob; a reply -> tensors per request.

Shared memory is used for tensors of `tensor_bytes_min` and more while every worker of the lane is on this host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.inputs import ABSENT
from millstream.gateway.tensors.outputs import Column, Outputs
from millstream.services.model.bytes_tensor import decode_elements
from millstream.services.model.datatypes import BYTES, ITEM_BYTES, NUMPY
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.segments.pool import SegmentPool
from millstream.services.wire.batch import ABSENT as ABSENT_INNER
from millstream.services.wire.batch import BatchHeader, BatchInput, Place, ReplyHeader, encode_batch

_ABSENT_INPUT = BatchInput(ABSENT_INNER, 0, None, None)
FORGET_PART = 16  # of what is known to be larger, with each reply that is smaller
INLINE_BYTES_MAX = 256 * 1024  # above this the tensors bypass the script in a key of their own


class Packed(NamedTuple):
    """An encoded batch. `blob`: bytes for its blob key, b"" if none. `places`: shared memory to give back with the reply.

    `segment_bytes`: of the tensors in it; the room for outputs is not counted, nothing has gone through it yet.
    """

    entry: bytes
    blob: bytes
    places: list[Place]
    segment_bytes: int


class Packer:
    """For one version. `row_bytes` of an output is known from the signature, or learnt: about the largest seen of late."""

    def __init__(self, signature: Signature, segments: SegmentPool | None, tensor_bytes_min: int) -> None:
        self._signature = signature
        self._segments = segments
        self._tensor_bytes_min = tensor_bytes_min
        self.batch_format: int | None = None  # that all workers of the lane read; None: the newest
        self.shared = False  # set while all workers of the lane are on this host
        self._batching = signature.batching
        self._row_bytes = [_row_bytes(spec, signature.batching) for spec in signature.outputs]
        self._learn = any(size == 0 for size in self._row_bytes)
        self._row_bytes_known = sum(self._row_bytes)

    def rows_within(self, bytes_max: int) -> int:
        """The most rows, at least one, whose outputs are not known to be larger than `bytes_max` together."""
        return max(1, bytes_max // max(1, self._row_bytes_known))

    def pack(
        self,
        name: str,
        replies: bytes,
        requests: Sequence[Request],
        now: float,
        redis_ms: float,
        *,
        deadlines: bool = True,
    ) -> Packed:
        """`now`: monotonic seconds; `redis_ms`: Redis' clock at the same instant, which the worker knows, too.

        `deadlines` False: the worker is told none.
        """
        rows = [request.rows for request in requests]
        places: list[Place] = []
        inputs: list[BatchInput] = []
        tensors: list[Any] = []
        inline_bytes = 0
        first = requests[0].inputs
        skew = redis_ms - now * 1000
        for i, spec in enumerate(self._signature.inputs):
            if spec.optional and first[i].shape == ABSENT.shape:
                inputs.append(_ABSENT_INPUT)  # for all: they would not share a batch otherwise
                continue
            parts = [request.inputs[i] for request in requests]
            size = parts[0].size_bytes if len(parts) == 1 else sum([part.size_bytes for part in parts])
            sizes = [part.size_bytes for part in parts] if spec.datatype == BYTES else None
            place = self._allocate(size)
            shape = first[i].shape
            if place is None:
                tensors += [part.data for part in parts]
                inline_bytes += size
            else:
                self._copy(place, parts)
                places.append(place)
            inputs.append(BatchInput(shape[1:] if self._batching else shape, size, sizes, place))
        shared = sum(place.size_bytes for place in places) if places else 0
        room = self._room(sum(rows), places)
        blob_name, blob = "", b""
        if inline_bytes > INLINE_BYTES_MAX:
            blob_name, blob, tensors = name, b"".join(tensors), []
        until = [skew + request.deadline * 1000 if deadlines else math.inf for request in requests]
        header = BatchHeader(name, replies, redis_ms, rows, until, inputs, room, blob_name, not requests[0].counted)
        return Packed(encode_batch(header, tensors, self.batch_format), blob, places, shared)

    def _allocate(self, size_bytes: int) -> Place | None:
        if size_bytes < self._tensor_bytes_min or not self.shared or self._segments is None:
            return None
        return self._segments.allocate(size_bytes)

    def _copy(self, place: Place, parts: Sequence[Any]) -> None:
        assert self._segments is not None
        view, at = self._segments.view(place), 0
        for part in parts:
            view[at : at + part.size_bytes] = _flat(part.data)
            at += part.size_bytes

    def _room(self, rows: int, places: list[Place]) -> list[Place | None]:
        room: list[Place | None] = []
        for row_bytes in self._row_bytes:
            place = self._allocate(row_bytes * rows)
            room.append(place)
            if place is not None:
                places.append(place)
        return room

    def unpack(self, header: ReplyHeader, inline: memoryview, live: Sequence[Request]) -> Outputs:
        """The outputs of the requests in `live` (those without a failure, in order), as views.

        Raises ValueError when the reply does not fit the signature and the requests.
        """
        if len(header.outputs) != len(self._row_bytes):
            raise ValueError(f"{len(header.outputs)} outputs in place of {len(self._row_bytes)}")
        total = sum([request.rows for request in live])
        columns: list[Column] = []
        offset = 0
        for i, output in enumerate(header.outputs):
            inner, size_bytes, sizes, place = output
            datatype = self._signature.outputs[i].datatype
            if place is not None and self._segments is not None:
                raw = self._segments.view(place)
            else:
                raw = inline[offset : offset + size_bytes]
                offset += size_bytes
            if self._learn and total:
                # One large answer does not reserve as much for all that come after it.
                known = self._row_bytes[i]
                self._row_bytes[i] = max(-(-size_bytes // total), known - known // FORGET_PART)
            if datatype == BYTES:
                columns.append(Column(BYTES, inner, self._elements(sizes or [], raw, len(live))))
            else:
                flat = np.frombuffer(raw, NUMPY[datatype])
                array = flat.reshape((total, *inner) if self._batching else inner)
                columns.append(Column(datatype, inner, array))
        return Outputs(columns, self._batching)

    @staticmethod
    def _elements(sizes: list[int], raw: memoryview, count: int) -> list[list[bytes]]:
        if len(sizes) != count:
            raise ValueError(f"texts of {len(sizes)} requests in place of {count}")
        ends = list(itertools.accumulate(sizes, initial=0))
        return [decode_elements(raw[a:b]) for a, b in itertools.pairwise(ends)]

    def free(self, places: Sequence[Place]) -> None:
        """Give back the shared memory of a batch."""
        if self._segments is not None:
            for place in places:
                self._segments.free(place)


def _flat(data: Any) -> Any:
    if isinstance(data, np.ndarray):
        return data.reshape(-1).view(np.uint8).data
    return data.cast("B") if isinstance(data, memoryview) else data


def _row_bytes(spec: TensorSpec, batching: bool) -> int:
    """Bytes of one row (of the whole output when the version does not batch); 0 when the signature does not say."""
    dims = spec.shape[1:] if batching else spec.shape
    if spec.datatype == BYTES or any(d < 0 for d in dims):
        return 0
    return math.prod(dims) * ITEM_BYTES[spec.datatype]
