"""Leased batches in a worker: an entry of the queue -> arrays to run -> its reply.

A lease is a batch with the id of the entry that must be acknowledged, or with the connection over which it came
directly. Its inputs are views (of the entry, or of shared memory) until they are merged with those of other leases.

Outputs that are too large are detected before any is encoded, and fail only their own requests:

outputs of a lease ─> fit ─> outputs of the requests that fit; the others fail with TOO_LARGE, or run AGAIN alone
a reply that Redis refuses ─> refusal ─> a small reply with an error for each request
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import BYTES, LENGTH_BYTES, NUMPY, decode_elements, encode_elements
from millstream.services.model.signature import Signature
from millstream.services.segments.segment import Segments
from millstream.services.wire.batch import (
    ABSENT,
    AGAIN,
    NO_ROOM,
    REPLY_FORMATS,
    BatchInput,
    ReplyHeader,
    ReplyOutput,
    ShmSlice,
    agreed_format,
    decode_batch,
    encode_reply,
    too_large,
)
from millstream.workers.models.loaded_models import DirectGate

Array = np.ndarray[Any, Any]
Inputs = dict[str, Array]


class Lease:
    """An entry of a stream that this worker leases, or a batch that a gateway sent to it directly.

    Raises ValueError if the batch cannot be read, or if its gateway reads no reply format that this worker can write.
    """

    __slots__ = (
        "attempt",
        "entry",
        "failures",
        "gate",
        "header",
        "inline",
        "lane",
        "leased_at",
        "link",
        "live_requests",
        "losses",
        "reply_format",
    )

    def __init__(self, lane: str, entry: bytes, data: bytes, attempt: int, leased_at: float = 0.0) -> None:
        self.lane = lane
        self.entry = entry
        self.attempt = attempt
        self.header, self.inline = decode_batch(data)
        readable = self.header.reply_formats
        newest = REPLY_FORMATS[-1]
        reply_format = newest if newest in readable else agreed_format(REPLY_FORMATS, [readable])
        if reply_format is None:
            raise ValueError(f"its gateway reads only replies of the formats {list(readable)}")
        self.reply_format = reply_format
        self.leased_at = leased_at  # monotonic; not later than the lease in Redis
        self.link: socket.socket | None = None  # over which it came directly; None: it is an entry of a stream
        self.gate: DirectGate | None = None  # of its version, if it came directly
        self.losses = 0  # connections that broke while the reply was sent
        self.failures: dict[int, list[str]] = {}
        self.live_requests: list[int] = list(range(len(self.header.rows)))  # positions of requests that are to run

    @property
    def isolated(self) -> bool:
        """Whether the batch must run alone, because a worker that leased it died or stopped sending heartbeats."""
        return self.attempt > 1

    @property
    def rows(self) -> int:
        """Rows of the live requests."""
        if len(self.live_requests) == len(self.header.rows):
            return sum(self.header.rows)
        return sum(self.header.rows[i] for i in self.live_requests)

    def fail(self, position: int, code: str, message: str) -> None:
        """Give the request at `position` an error (a `Code`, or AGAIN) and take it out of the live requests."""
        self.failures[position] = [str(code), message]
        self.live_requests.remove(position)

    def drop_expired(self, now_ms: float) -> None:
        """Fail requests whose deadline has passed."""
        if min(self.header.deadlines_ms) > now_ms:
            return
        for i in [i for i in self.live_requests if self.header.deadlines_ms[i] <= now_ms]:
            self.fail(i, Code.EXPIRED, "the deadline passed before the request could run")


def input_arrays(lease: Lease, signature: Signature, segments: Segments) -> Inputs:
    """Return the inputs of a lease's live requests by name, without optional inputs that the requests do not have."""
    header, offset = lease.header, 0
    arrays: Inputs = {}
    rows = sum(header.rows)
    for spec, tensor in zip(signature.inputs, header.inputs, strict=True):
        if spec.optional and tensor.inner == ABSENT:
            continue
        if tensor.shm is not None:
            raw = segments.view(tensor.shm)
        else:
            raw = lease.inline[offset : offset + tensor.size_bytes]
            offset += tensor.size_bytes
        arrays[spec.name] = _array(spec.datatype, tensor, raw, rows if signature.batching else None)
    if len(lease.live_requests) < len(header.rows) and signature.batching:
        bounds = np.cumsum([0, *header.rows])
        keep = [slice(bounds[i], bounds[i + 1]) for i in lease.live_requests]
        arrays = {name: np.concatenate([array[part] for part in keep]) for name, array in arrays.items()}
    return arrays


def _array(datatype: str, tensor: BatchInput, raw: memoryview, rows: int | None) -> Array:
    shape = tensor.inner if rows is None else (rows, *tensor.inner)
    if datatype == BYTES:
        elements = np.empty(int(np.prod(shape)), dtype=object)
        elements[:] = decode_elements(raw)
        return elements.reshape(shape)
    return np.frombuffer(raw, NUMPY[datatype]).reshape(shape)


def fail_outside(lease: Lease, inputs: Inputs, ranges: Mapping[str, tuple[int, int]], *, batching: bool) -> bool:
    """Fail requests with an index outside of the model's table, and return whether there are any.

    Such an index would fail the run of all requests, or be answered with anything, as the device decides.
    """
    faults: dict[int, str] = {}
    for name, (low, high) in ranges.items():
        array = inputs.get(name)
        if array is None or not array.size or (low <= array.min() and array.max() <= high):
            continue
        row = 0
        for position in lease.live_requests:
            rows = lease.header.rows[position]
            part = array[row : row + rows] if batching else array
            outside = (part < low) | (part > high)
            if outside.any():
                faults.setdefault(position, _outside(name, part, outside, low, high))
            row += rows
    for position, message in faults.items():
        lease.fail(position, Code.INVALID, message)
    return bool(faults)


def _outside(name: str, part: Array, outside: Array, low: int, high: int) -> str:
    at = tuple(np.argwhere(outside)[0].tolist())
    where = "".join(f"[{index}]" for index in at)
    return f"input '{name}' at {where}: {part[at]} is outside of the model's table, whose indices are {low} to {high}"


class RunCost(NamedTuple):
    """Start, durations and rows of a run."""

    began_ms: float  # on the Redis clock
    input_s: float  # merging inputs
    infer_s: float  # running the model
    split_s: float  # splitting outputs
    rows: int  # of all leases in the run
    runs: list[int]  # as in ReplyHeader
    form: str = ""  # as in ReplyHeader


class LeaseValidity:
    """Tells whether leases of this worker cannot have been reclaimed. The heartbeat writes it. Instants: monotonic."""

    def __init__(self, lease_s: float) -> None:
        self.lease_s = lease_s
        self._last_beat = 0.0
        self._since = 0.0  # leases taken after this time were not reclaimed

    def forget(self) -> None:
        """Declare all leases taken until now invalid: other workers may have them."""
        self._since = time.monotonic()

    def beat(self, began: float, *, known: bool) -> None:
        """Record a beat that reached Redis. `known`: Redis knew the worker before it."""
        if not known or began - self._last_beat >= self.lease_s:
            self.forget()  # before `_last_beat` changes: `holds` must not see the new value alone
        self._last_beat = began

    def holds(self, leased_at: float) -> bool:
        """Return whether a lease taken at `leased_at` cannot have been reclaimed.

        This holds if each beat since then reached Redis within the lease time of the previous beat.
        """
        return leased_at >= self._since and time.monotonic() - self._last_beat < self.lease_s


class ReplyWriter:
    """Turns the outputs of a run into replies.

    Args:
        inline_bytes_max: larger outputs go into a blob.
        bytes_max: limit of the outputs of one reply.
        lease_valid: returns whether this worker still owns a lease that it took at this time (monotonic). A worker that
            was frozen until its leases expired must not write into shared memory, which may belong to another batch
            by then; the queue drops its reply anyway.
    """

    def __init__(
        self,
        worker: str,
        segments: Segments,
        inline_bytes_max: int,
        bytes_max: int,
        lease_valid: Callable[[float], bool],
    ) -> None:
        self.segments = segments
        self._worker = worker
        self._lease_valid = lease_valid
        self._inline_bytes_max = inline_bytes_max
        self._bytes_max = bytes_max
        # Counters, which ReplySender reads and resets.
        self.too_large = 0  # requests whose outputs were too large
        self.segment_bytes = 0

    def write(
        self, lease: Lease, signature: Signature, outputs: Sequence[Array] | None, cost: RunCost
    ) -> tuple[bytes, bytes]:
        """Return the reply to a lease, and the bytes to store in a blob key before it (b"" when they are inline).

        `outputs` are those of the live requests; None when all of them failed. A request fails if its outputs are too
        large, or if there is no memory to encode them.
        """
        try:
            if outputs is not None:
                outputs, refused = fit(lease, outputs, signature.batching, self._bytes_max)
                self.too_large += refused
            return self._write(lease, signature, outputs, cost)
        except MemoryError:
            for position in list(lease.live_requests):
                lease.fail(position, Code.MODEL, "there was no memory for the reply")
            return self._write(lease, signature, None, cost)

    def _write(
        self, lease: Lease, signature: Signature, outputs: Sequence[Array] | None, cost: RunCost
    ) -> tuple[bytes, bytes]:
        began = time.perf_counter()
        tensors: list[Any] = []
        headers: list[ReplyOutput] = []
        inline_bytes = 0
        for i, array in enumerate(outputs or ()):
            datatype = signature.outputs[i].datatype
            shm = lease.header.output_slots[i] if i < len(lease.header.output_slots) else None
            output, data = self._output(lease, datatype, array, shm, signature.batching)
            headers.append(output)
            if output.shm is None and output.size_bytes:
                tensors.append(data)
                inline_bytes += output.size_bytes
        blob, body = "", b""
        if inline_bytes > self._inline_bytes_max:
            blob, body, tensors = f"reply-{lease.header.name}-{lease.attempt}", b"".join(tensors), []
        header = ReplyHeader(
            lease.header.name,
            self._worker,
            max(0.0, (cost.began_ms - lease.header.created_ms) / 1000),
            cost.input_s,
            cost.infer_s,
            cost.split_s + time.perf_counter() - began,
            cost.rows,
            cost.runs,
            lease.failures,
            headers,
            blob,
            lease.attempt,
            cost.form,
        )
        return encode_reply(header, tensors, lease.reply_format), body

    def _output(
        self, lease: Lease, datatype: str, array: Array, shm: ShmSlice | None, batching: bool
    ) -> tuple[ReplyOutput, Any]:
        inner = array.shape[1:] if batching else array.shape
        sizes: list[int] | None = None
        if datatype == BYTES:
            parts = self._element_parts(lease, array, batching)
            sizes = [len(part) for part in parts]
            data: Any = b"".join(parts)
            size_bytes = len(data)
        else:
            contiguous = np.ascontiguousarray(array, dtype=NUMPY[datatype])
            size_bytes = contiguous.nbytes
            data = contiguous.reshape(-1).view(np.uint8).data if size_bytes else b""
        if shm is not None and 0 < size_bytes <= shm.size_bytes and self._lease_valid(lease.leased_at):
            self.segments.view(shm)[:size_bytes] = data
            self.segment_bytes += size_bytes
            return ReplyOutput(inner, size_bytes, sizes, ShmSlice(shm.segment, shm.offset, size_bytes)), b""
        return ReplyOutput(inner, size_bytes, sizes, None), data

    @staticmethod
    def _element_parts(lease: Lease, array: Array, batching: bool) -> list[bytes]:
        if not batching:
            return [encode_elements(array.reshape(-1))]
        bounds = np.cumsum([0, *(lease.header.rows[i] for i in lease.live_requests)])
        return [encode_elements(array[a:b].reshape(-1)) for a, b in pairwise(bounds)]


#: How often the connection may break while one reply is sent: by a restart of Redis, or because of the reply itself.
LOSSES_MAX = 3


def fit(lease: Lease, outputs: Sequence[Array], batching: bool, bytes_max: int) -> tuple[Sequence[Array] | None, int]:
    """Return the outputs that fit into `bytes_max`, None if there are none, and how many requests are too large.

    `outputs` are those of all live requests of the lease. A request whose own outputs exceed the limit fails with
    TOO_LARGE. The others are answered in order as far as they fit into one reply; the gateway queues each of the
    remaining requests again, alone.
    """
    if sum(_size_bytes(array) for array in outputs) <= bytes_max:  # nearly always
        return outputs, 0
    bounds = (
        np.cumsum([0, *(lease.header.rows[position] for position in lease.live_requests)]).tolist()
        if batching
        else [0, 0]
    )
    left, kept, refused = bytes_max, [], 0
    for position, (start, end) in zip(list(lease.live_requests), pairwise(bounds), strict=True):
        share = slice(start, end)
        size = sum(_size_bytes(array[share] if batching else array) for array in outputs)
        if size > bytes_max:
            refused += 1
            lease.fail(position, Code.TOO_LARGE, too_large(size, bytes_max))
        elif size > left:
            lease.fail(position, AGAIN, NO_ROOM)
        else:
            left -= size
            kept.append(share)
    if not kept:
        return None, refused
    return [np.concatenate([array[share] for share in kept]) for array in outputs], refused


def _size_bytes(array: Array) -> int:
    """Return the bytes of an output in raw form."""
    if array.dtype != object:
        return array.nbytes
    return LENGTH_BYTES * array.size + sum(map(len, array.reshape(-1).tolist()))


def refusal(lease: Lease, worker: str, failure: Failure) -> bytes:
    """Return a reply without outputs, in which every request without an error gets this failure."""
    failures = {position: [failure.code.value, failure.message] for position in range(len(lease.header.rows))}
    header = ReplyHeader(
        lease.header.name, worker, 0.0, 0.0, 0.0, 0.0, 0, [], failures | lease.failures, [], "", lease.attempt
    )
    return encode_reply(header, [], lease.reply_format)
