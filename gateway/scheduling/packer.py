"""Serialises a batch, and reads its reply.

requests ─> tensors in shared memory, inline, or in a blob ─> entry        reply ─> outputs of its requests, as views

Shared memory takes tensors of at least `tensor_bytes_min` bytes while every worker of the lane is on this host.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import orjson

from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.inputs import ABSENT
from millstream.gateway.tensors.output_options import LabelledOutputs
from millstream.gateway.tensors.outputs import Column, Outputs
from millstream.services.model.datatypes import BYTES, ITEM_BYTES, NUMPY, decode_elements
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.segments.pool import SegmentPool
from millstream.services.segments.shared_buffers import Place, place_of
from millstream.services.wire.batch import ABSENT as ABSENT_INNER
from millstream.services.wire.batch import (
    INLINE_BYTES_MAX,
    BatchHeader,
    BatchInput,
    ReplyHeader,
    ShmSlice,
    encode_batch,
)

_ABSENT_INPUT = BatchInput(ABSENT_INNER, 0, None, None)
FORGET_PART = 16  # a smaller reply lowers the learned row size by 1/16


class Packed(NamedTuple):
    """An encoded batch."""

    entry: bytes
    blob: bytes  # bytes for its blob key; b"": it has none
    slices: list[ShmSlice]  # its shared memory, given back after the reply
    segment_bytes: int  # input tensors in shared memory; slots for outputs do not count, since they are empty


class Packer:
    """Serialises the batches of one version.

    The bytes of an output's row are known from the signature, or learned: about the largest of recent replies.

    Args:
        signature: the version's.
        segments: shared memory; None: no tensor goes through shared memory.
        tensor_bytes_min: size from which a tensor goes through shared memory.
        labelled: adds labels to the outputs; None: the version answers none.
    """

    def __init__(
        self,
        signature: Signature,
        segments: SegmentPool | None,
        tensor_bytes_min: int,
        labelled: LabelledOutputs | None = None,
        *,
        tells: bool = False,
    ) -> None:
        self._signature = signature
        self._tells = tells
        self._labelled = labelled
        self._segments = segments
        self._tensor_bytes_min = tensor_bytes_min
        self.batch_format: int | None = None  # the format that all workers of the lane read; None: the newest
        self.same_host = False  # whether all workers of the lane share memory with this gateway
        self._batching = signature.batching
        self._row_bytes = [_row_bytes(spec, signature.batching) for spec in signature.outputs]
        self._learn = any(size == 0 for size in self._row_bytes)
        self.row_bytes_known = sum(self._row_bytes)  # outputs whose size is not in the signature count as 0

    def rows_within(self, bytes_max: int) -> int:
        """Return the largest number of rows, at least 1, whose outputs of known size fit into `bytes_max`."""
        return max(1, bytes_max // max(1, self.row_bytes_known))

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
        """Return the encoded batch.

        Args:
            name: name of the batch.
            replies: key of the Redis list that takes the reply.
            requests: at least one; their inputs have compatible shapes.
            now: monotonic seconds.
            redis_ms: milliseconds of Redis' clock at the same instant; the worker follows that clock, too.
            deadlines: whether the batch carries the requests' deadlines.
        """
        rows = [request.rows for request in requests]
        slices: list[ShmSlice] = []
        inputs: list[BatchInput] = []
        tensors: list[Any] = []
        inline_bytes = segment_bytes = 0
        first = requests[0].inputs
        skew = redis_ms - now * 1000
        for i, spec in enumerate(self._signature.inputs):
            if spec.optional and first[i].shape == ABSENT.shape:
                inputs.append(_ABSENT_INPUT)  # absent in all requests: others could not share the batch
                continue
            parts = [request.inputs[i] for request in requests]
            size = parts[0].size_bytes if len(parts) == 1 else sum([part.size_bytes for part in parts])
            sizes = [part.size_bytes for part in parts] if spec.datatype == BYTES else None
            place = self._place(parts[0].data, size) if len(parts) == 1 else None
            shm_slice = self._allocate(size) if place is None else place.shm
            shape = first[i].shape
            if shm_slice is None:
                tensors += [part.data for part in parts]
                inline_bytes += size
            else:
                segment_bytes += size
                slices.append(shm_slice if place is None else place.within)
                if place is None:
                    self._copy(shm_slice, parts)
            inputs.append(BatchInput(shape[1:] if self._batching else shape, size, sizes, shm_slice))
        slots = self._output_slots(sum(rows), slices)
        blob_name, blob = "", b""
        if inline_bytes > INLINE_BYTES_MAX:
            blob_name, blob, tensors = name, b"".join(tensors), []
        until = [skew + request.deadline * 1000 if deadlines else math.inf for request in requests]
        probe, window = not requests[0].counted, requests[0].window
        header = BatchHeader(name, replies, redis_ms, rows, until, inputs, slots, blob_name, probe, window=window)
        if self._tells and not probe:
            header = msgspec.structs.replace(header, told=[self._told(request) for request in requests])
        return Packed(encode_batch(header, tensors, self.batch_format), blob, slices, segment_bytes)

    def _told(self, request: Request) -> bytes:
        """Return what the model is told of a request."""
        said = request.said
        if request.wanted is not None:
            said["outputs"] = [self._signature.outputs[index].name for index in request.wanted]
        return orjson.dumps(said) if said else b"{}"

    def _allocate(self, size_bytes: int) -> ShmSlice | None:
        if size_bytes < self._tensor_bytes_min or not self.same_host or self._segments is None:
            return None
        return self._segments.allocate(size_bytes)

    def _place(self, data: Any, size_bytes: int) -> Place | None:
        """Return where a tensor was received in shared memory; its slice has one more user then. None: copy it."""
        if size_bytes < self._tensor_bytes_min or not self.same_host or self._segments is None:
            return None
        place = place_of(data)
        if place is not None:
            self._segments.share(place.within)
        return place

    def _copy(self, shm_slice: ShmSlice, parts: Sequence[Any]) -> None:
        assert self._segments is not None
        view, at = self._segments.view(shm_slice), 0
        for part in parts:
            view[at : at + part.size_bytes] = _flat(part.data)
            at += part.size_bytes

    def _output_slots(self, rows: int, slices: list[ShmSlice]) -> list[ShmSlice | None]:
        slots: list[ShmSlice | None] = []
        for row_bytes in self._row_bytes:
            shm_slice = self._allocate(row_bytes * rows)
            slots.append(shm_slice)
            if shm_slice is not None:
                slices.append(shm_slice)
        return slots

    def unpack(self, header: ReplyHeader, inline: memoryview, live: Sequence[Request]) -> Outputs:
        """Return the outputs of the requests in `live` (those without a failure, in order), as views.

        Raises ValueError when the reply does not fit the signature and the requests.
        """
        if len(header.outputs) != len(self._row_bytes):
            raise ValueError(f"{len(header.outputs)} outputs in place of {len(self._row_bytes)}")
        total = sum([request.rows for request in live])
        columns: list[Column] = []
        offset = 0
        for i, output in enumerate(header.outputs):
            inner, size_bytes, shm_slice = output.inner, output.size_bytes, output.shm
            datatype = self._signature.outputs[i].datatype
            if shm_slice is not None and self._segments is not None:
                raw = self._segments.view(shm_slice)
            else:
                raw = inline[offset : offset + size_bytes]
                offset += size_bytes
            if self._learn and total:
                # Forget slowly: one large reply must not reserve as much for all later batches.
                learned = self._row_bytes[i]
                self._row_bytes[i] = max(-(-size_bytes // total), learned - learned // FORGET_PART)
            if datatype == BYTES:
                columns.append(Column(BYTES, inner, self._elements(output.sizes or [], raw, len(live))))
            else:
                flat = np.frombuffer(raw, NUMPY[datatype])
                array = flat.reshape((total, *inner) if self._batching else inner)
                columns.append(Column(datatype, inner, array))
        outputs = Outputs(columns, self._batching)
        return outputs if self._labelled is None else self._labelled.add(outputs, [request.rows for request in live])

    @staticmethod
    def _elements(sizes: list[int], raw: memoryview, count: int) -> list[list[bytes]]:
        if len(sizes) != count:
            raise ValueError(f"texts of {len(sizes)} requests in place of {count}")
        ends = list(itertools.accumulate(sizes, initial=0))
        return [decode_elements(raw[a:b]) for a, b in itertools.pairwise(ends)]

    def free(self, slices: Sequence[ShmSlice]) -> None:
        """Give back shared memory."""
        if self._segments is not None:
            for shm_slice in slices:
                self._segments.free(shm_slice)


def _flat(data: Any) -> Any:
    if isinstance(data, np.ndarray):
        return data.reshape(-1).view(np.uint8).data
    return data.cast("B") if isinstance(data, memoryview) else data


def _row_bytes(spec: TensorSpec, batching: bool) -> int:
    """Return the bytes of an output's row, or of the output if the version does not batch; 0 if unknown."""
    dims = spec.shape[1:] if batching else spec.shape
    if spec.datatype == BYTES or any(d < 0 for d in dims):
        return 0
    return math.prod(dims) * ITEM_BYTES[spec.datatype]
