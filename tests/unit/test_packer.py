"""Requests -> a batch -> arrays in a worker -> a reply -> outputs per request: both ends of the queue, meeting only
here.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from millstream.gateway.scheduling import packer as packing
from millstream.gateway.scheduling.packer import Packed, Packer
from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import BYTES, DATATYPES, NUMPY, decode_elements, encode_elements
from millstream.services.model.signature import Signature, TensorSpec
from millstream.services.segments.pool import SegmentPool
from millstream.services.segments.segment import Segments
from millstream.services.segments.shared_buffers import SharedBuffers
from millstream.services.wire.batch import (
    INLINE_BYTES_MAX,
    ReplyHeader,
    ReplyOutput,
    ShmSlice,
    decode_batch,
    decode_reply,
)
from millstream.workers.backends.base import check_outputs
from millstream.workers.batches.lease import Array, Lease, ReplyWriter, RunCost, input_arrays
from tests.kit.responders import DISCARD

NOW, WALL_MS = 100.0, 5_000_000.0
FAR = NOW + 60
COST = RunCost(WALL_MS, 0.0, 0.5, 0.0, 7, [4, 3])
ALL = sorted(DATATYPES)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    path = Path(f"/dev/shm/millstream-packing-{os.getpid()}")
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def segments(folder: Path) -> Iterator[SegmentPool]:
    pool = SegmentPool(folder, "a", 256 << 20)
    yield pool
    pool.close()


@dataclass
class Ends:
    """A gateway's end and a worker's. `way`: how tensors travel."""

    packer: Packer
    segments: Segments
    writer: ReplyWriter
    signature: Signature
    way: str

    def lease(self, requests: Sequence[Request], attempt: int = 1) -> tuple[Packed, Lease]:
        packed = self.packer.pack("g-1", b"replies", requests, NOW, WALL_MS)
        lease = Lease("lane", b"1-0", packed.entry, attempt)
        if lease.header.blob:
            lease.inline = memoryview(packed.blob)
        return packed, lease

    def reply(
        self, lease: Lease, outputs: Sequence[Array] | None, live: Sequence[Request]
    ) -> tuple[ReplyHeader, list[list[OutputTensor]]]:
        data, body = self.writer.write(lease, self.signature, outputs, COST)
        decoded = decode_reply(data)
        assert not isinstance(decoded, str)
        header, inline = decoded
        assert bool(header.blob) == bool(body)
        if not live:
            return header, []
        unpacked = self.packer.unpack(header, memoryview(body) if body else inline, live)
        return header, unpacked.replies([request.rows for request in live])


def ends(
    signature: Signature, pool: SegmentPool, folder: Path, way: str, valid: Callable[[float], bool] = lambda _: True
) -> Ends:
    packer = Packer(signature, pool, 1)
    packer.same_host = way == "shared"
    workers = Segments(folder)
    writer = ReplyWriter("w", workers, 16 if way == "blob" else 1 << 20, 1 << 30, valid)
    return Ends(packer, workers, writer, signature, way)


def same(datatypes: Sequence[str], inner: Sequence[int], batching: bool) -> Signature:
    """Outputs like inputs."""
    shape = (-1, *inner) if batching else tuple(inner)
    specs = {
        side: tuple(
            TensorSpec(name=f"{side}{i}", datatype=datatype, shape=shape) for i, datatype in enumerate(datatypes)
        )
        for side in "xy"
    }
    return Signature(inputs=specs["x"], outputs=specs["y"], batching=batching)


def array(datatype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Any values of a datatype, NaN among them; texts with zero bytes at their ends."""
    count = int(np.prod(shape))
    if datatype == BYTES:
        texts = np.empty(count, dtype=object)
        texts[:] = [rng.bytes(int(rng.integers(0, 5))) + b"\0" * int(rng.integers(0, 2)) for _ in range(count)]
        return texts.reshape(shape)
    dtype = NUMPY[datatype]
    if datatype == "BOOL":
        return rng.integers(0, 2, shape).astype(np.bool_)
    return np.frombuffer(rng.bytes(count * dtype.itemsize), dtype).reshape(shape)


def raw(value: Array) -> bytes:
    return encode_elements(value.reshape(-1).tolist()) if value.dtype == object else value.tobytes()


def forms(value: Array) -> list[Any]:
    """What an adapter may put into a request for these values."""
    data = raw(value)
    plain: list[Any] = [data, bytearray(data), memoryview(data)]
    if value.dtype == object:
        return plain
    return [*plain, value, np.ascontiguousarray(value).data if value.size else data]


def request(values: Sequence[Array], rows: int, form: int = 0, deadline: float = FAR) -> Request:
    inputs = [InputTensor(value.shape, forms(value)[form % len(forms(value))], len(raw(value))) for value in values]
    return Request(inputs, rows, 0, NOW, deadline, DISCARD)


def equal(output: OutputTensor, wanted: Array, datatype: str) -> bool:
    """Bit by bit, so that NaN is like itself."""
    if isinstance(output.array, list):
        same_data = output.array == wanted.reshape(-1).tolist()
    else:
        same_data = output.array.dtype == NUMPY[datatype] and output.array.tobytes() == wanted.tobytes()
        same_data = same_data and output.array.shape == wanted.shape
    return same_data and output.shape == wanted.shape and output.datatype == datatype


WAYS = pytest.mark.parametrize("way", ["inline", "shared", "blob"])


@WAYS
@given(
    datatypes=st.lists(st.sampled_from(ALL), min_size=1, max_size=3),
    inner=st.lists(st.integers(0, 3), max_size=2),
    rows=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    fates=st.lists(st.sampled_from(["runs", "runs", "fails", "expired"]), min_size=5, max_size=5),
    seed=st.integers(0, 2**32),
)
@settings(
    deadline=None, derandomize=True, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_each_request_gets_its_own_rows_back(segments, folder, way, datatypes, inner, rows, fates, seed):
    """A batch of requests of which some fail and some expire before they run; the model gives back what it got."""
    rng = np.random.default_rng(seed)
    end = ends(same(datatypes, inner, batching=True), segments, folder, way)
    values = [[array(datatype, (count, *inner), rng) for datatype in datatypes] for count in rows]
    deadlines = {"expired": NOW - 1}
    requests = [
        request(value, count, form=seed + i, deadline=deadlines.get(fates[i], FAR))
        for i, (value, count) in enumerate(zip(values, rows, strict=True))
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "INLINE_BYTES_MAX", 16 if way == "blob" else 1 << 20)
        packed, lease = end.lease(requests)
    assert (lease.header.rows, lease.rows) == (rows, sum(rows))
    lease.drop_expired(WALL_MS)
    for i in [i for i in lease.live_requests if fates[i] == "fails"]:
        lease.fail(i, Code.MODEL, f"request {i}")
    alive = [i for i in range(len(rows)) if fates[i] == "runs"]
    assert lease.live_requests == alive
    assert lease.rows == sum(rows[i] for i in alive)

    outputs = list(input_arrays(lease, end.signature, end.segments).values()) if alive else None
    for k, merged in enumerate(outputs or ()):
        assert raw(merged) == raw(np.concatenate([values[i][k] for i in alive]))
    header, replies = end.reply(lease, outputs, [requests[i] for i in alive])
    codes = {"fails": Code.MODEL, "expired": Code.EXPIRED}
    assert {i: code for i, (code, _) in header.failures.items()} == {
        i: codes[fates[i]] for i in range(len(rows)) if fates[i] != "runs"
    }
    assert (header.name, header.worker, header.infer_s, header.run_rows, header.runs) == ("g-1", "w", 0.5, 7, [4, 3])
    assert len(replies) == len(alive)
    for i, outs in zip(alive, replies, strict=True):
        assert all(equal(out, value, kind) for out, value, kind in zip(outs, values[i], datatypes, strict=True))
    del outputs, replies
    assert packed.segment_bytes == sum(tensor.size_bytes for tensor in lease.header.inputs if tensor.shm)
    assert bool(packed.slices) <= (way == "shared")
    end.packer.free(packed.slices)
    assert segments.in_use_bytes == 0


@WAYS
@given(
    datatypes=st.lists(st.sampled_from(ALL), min_size=1, max_size=3),
    shape=st.lists(st.integers(0, 3), max_size=3).map(tuple),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_version_that_does_not_batch_gets_exactly_the_shapes_given(segments, folder, way, datatypes, shape, seed):
    rng = np.random.default_rng(seed)
    end = ends(same(datatypes, shape, batching=False), segments, folder, way)
    values = [array(datatype, shape, rng) for datatype in datatypes]
    one = request(values, 1, form=seed)
    packed, lease = end.lease([one])
    arrays = list(input_arrays(lease, end.signature, end.segments).values())
    assert [(got.shape, raw(got)) for got in arrays] == [(value.shape, raw(value)) for value in values]
    _, [outs] = end.reply(lease, arrays, [one])
    assert all(equal(out, value, kind) for out, value, kind in zip(outs, values, datatypes, strict=True))
    end.packer.free(packed.slices)


def floats(*values: float) -> Array:
    return np.array(values, np.float32).reshape(-1, 1)


def test_a_tensor_goes_through_shared_memory_from_its_size_on_and_only_if_all_workers_see_it(segments, folder):
    signature = same(["FP32"], [1], batching=True)
    packer = Packer(signature, segments, 16)
    small, large = request([floats(1, 2, 3)], 3), request([floats(1, 2, 3, 4)], 4)
    assert packer.pack("a", b"r", [large], NOW, WALL_MS).slices == []
    packer.same_host = True
    assert packer.pack("a", b"r", [small], NOW, WALL_MS).slices == []
    packed = packer.pack("a", b"r", [large], NOW, WALL_MS)
    header, inline = decode_batch(packed.entry)
    assert packed.slices == [header.inputs[0].shm, header.output_slots[0]]
    assert (bytes(inline), packed.blob, packed.segment_bytes) == (b"", b"", 16)
    packer.free(packed.slices)
    alone = Packer(signature, None, 16)
    alone.same_host = True
    assert alone.pack("a", b"r", [large], NOW, WALL_MS).slices == []


def test_without_room_in_shared_memory_tensors_travel_inline(folder):
    packer = Packer(same(["FP32"], [1], batching=True), SegmentPool(folder, "full", 0), 1)
    packer.same_host = True
    one = request([floats(1, 2)], 2)
    header, inline = decode_batch(packer.pack("a", b"r", [one], NOW, WALL_MS).entry)
    assert (header.inputs[0].shm, header.output_slots, bytes(inline)) == (None, [None], floats(1, 2).tobytes())


def test_only_what_is_too_large_for_a_script_goes_into_a_blob(segments):
    packer = Packer(same(["UINT8"], [1], batching=True), segments, 1)
    for size, blob in ((INLINE_BYTES_MAX, ""), (INLINE_BYTES_MAX + 1, "name")):
        data = np.ones((size, 1), np.uint8)
        packed = packer.pack("name", b"r", [request([data], size)], NOW, WALL_MS)
        header, inline = decode_batch(packed.entry)
        assert header.blob == blob
        assert (len(packed.blob), len(inline)) == ((size, 0) if blob else (0, size))


def test_deadlines_are_told_on_the_wall_clock(segments):
    packer = Packer(same(["FP32"], [1], batching=True), segments, 1)
    requests = [request([floats(1)], 1, deadline=NOW + seconds) for seconds in (1, 2.5)]
    header, _ = decode_batch(packer.pack("a", b"r", requests, NOW, WALL_MS).entry)
    assert header.deadlines_ms == [WALL_MS + 1000, WALL_MS + 2500]
    assert (header.created_ms, header.replies) == (WALL_MS, b"r")


def test_room_for_outputs_whose_size_the_signature_does_not_say_is_learnt(segments, folder):
    end = ends(same([BYTES], [1], batching=True), segments, folder, "shared")
    texts = np.array([[b"12345678"], [b"1234"]], dtype=object)
    two = [request([texts[:1]], 1), request([texts[1:]], 1)]
    packed, lease = end.lease(two)
    assert lease.header.output_slots == [None]
    end.reply(lease, [texts], two)
    end.packer.free(packed.slices)
    packed, lease = end.lease(two)
    [place] = lease.header.output_slots
    assert place is not None
    assert place.size_bytes == 2 * 10  # 8 + 4 bytes and two lengths, by two rows, rounded up
    header, replies = end.reply(lease, [texts], two)
    assert header.outputs[0].shm == ShmSlice(place.segment, place.offset, 20)
    assert [reply[0].array for reply in replies] == [[b"12345678"], [b"1234"]]
    end.packer.free(packed.slices)


def test_a_worker_whose_lease_is_over_does_not_touch_shared_memory(segments, folder):
    end = ends(same(["FP32"], [1], batching=True), segments, folder, "shared", valid=lambda _: False)
    one = request([floats(1, 2)], 2)
    packed, lease = end.lease([one])
    segments.view(packed.slices[1])[:] = b"untouche"
    header, [[output]] = end.reply(lease, [floats(3, 4)], [one])
    assert header.outputs[0].shm is None
    assert np.asarray(output.array).tolist() == [[3], [4]]
    [_, room] = packed.slices
    assert lease.header.output_slots == [room]
    assert bytes(segments.view(room)) == b"untouche"
    end.packer.free(packed.slices)


def test_an_output_larger_than_its_room_travels_inline(segments, folder):
    end = ends(same(["FP32"], [1], batching=True), segments, folder, "shared")
    one = request([floats(1)], 1)
    packed, lease = end.lease([one])
    wide = np.arange(3, dtype=np.float32).reshape(1, 3)
    header, [[output]] = end.reply(lease, [wide], [one])
    assert (header.outputs[0].shm, output.shape) == (None, (1, 3))
    end.packer.free(packed.slices)


def test_outputs_of_another_layout_or_type_are_put_right(segments, folder):
    end = ends(same(["FP32"], [2], batching=True), segments, folder, "inline")
    one = request([np.zeros((2, 2), np.float32)], 2)
    _, lease = end.lease([one])
    columns = np.asfortranarray(np.array([[1, 2], [3, 4]], np.float64))
    _, [[output]] = end.reply(lease, [columns], [one])
    assert np.asarray(output.array).tolist() == [[1, 2], [3, 4]]


def test_inline_tensors_lie_where_they_can_be_used(segments, folder):
    end = ends(same(["FP64"], [1], batching=True), segments, folder, "inline")
    for name in range(20):
        one = request([np.ones((1, 1))], 1)
        packed = end.packer.pack("n" * name, b"r", [one], NOW, WALL_MS)
        [value] = input_arrays(Lease("lane", b"1-0", packed.entry, 1), end.signature, end.segments).values()
        assert value.flags.aligned


BROKEN = {
    "an output is missing": lambda out: [],
    "one too many": lambda out: [out, out],
    "too few rows": lambda out: [replace(out, size_bytes=4)],
    "not a whole element": lambda out: [replace(out, size_bytes=7)],
    "another shape": lambda out: [replace(out, inner=(2,))],
    "bytes of nowhere": lambda out: [replace(out, shm=ShmSlice("gone", 0, 8))],
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_reply_that_does_not_fit_is_refused(segments, how):
    packer = Packer(same(["FP32"], [1], batching=True), segments, 1)
    out = ReplyOutput((1,), 8, None, None)
    header = ReplyHeader("a", "w", 0.0, 0.0, 0.0, 0.0, 2, [2], {}, BROKEN[how](out), "")
    with pytest.raises(ValueError):
        packer.unpack(header, memoryview(bytes(8)), [request([floats(1, 2)], 2)])


@pytest.mark.parametrize("sizes", [None, [6], [6, 6, 0], [7, 5]])
def test_a_reply_of_texts_that_does_not_fit_is_refused(segments, sizes):
    packer = Packer(same([BYTES], [1], batching=True), segments, 1)
    data = encode_elements([b"ab", b"cd"])
    header = ReplyHeader("a", "w", 0.0, 0.0, 0.0, 0.0, 2, [2], {}, [ReplyOutput((1,), len(data), sizes, None)], "")
    two = [request([np.array([[b"x"]], dtype=object)], 1) for _ in range(2)]
    with pytest.raises(ValueError):
        packer.unpack(header, memoryview(data), two)
    assert decode_elements(data) == [b"ab", b"cd"]


@pytest.mark.parametrize("lost", ["blob", "segment", "input"])
def test_tensors_that_are_gone_are_an_error_of_the_batch(segments, folder, lost):
    end = ends(
        same(["FP32", "FP32"], [1], batching=True), segments, folder, "shared" if lost == "segment" else "inline"
    )
    packed, lease = end.lease([request([floats(1), floats(2)], 1)])
    if lost == "blob":
        lease.inline = memoryview(b"")
    elif lost == "input":
        lease.header.inputs.pop()
    else:
        lease.header.inputs[0] = replace(lease.header.inputs[0], shm=ShmSlice("gone", 0, 4))
    with pytest.raises((ValueError, Failure)):
        input_arrays(lease, end.signature, end.segments)
    end.packer.free(packed.slices)


@pytest.mark.parametrize("output", [np.zeros((2, 1)), np.zeros(()), np.zeros((0, 3))])
def test_a_version_that_does_not_give_a_row_for_a_row_is_told_so(output):
    signature = same(["FP64"], [1], batching=True)
    check_outputs([np.zeros((3, 1))], signature, 3)
    with pytest.raises(Failure, match='"batching": false') as failure:
        check_outputs([output], signature, 3)
    assert failure.value.code is Code.MODEL
    check_outputs([output], same(["FP64"], [1], batching=False), 3)


@pytest.mark.parametrize("batching", [True, False])
@pytest.mark.parametrize("count", [0, 2])
def test_a_version_that_does_not_give_each_output_is_told_so(batching, count):
    with pytest.raises(Failure, match=f"{count} outputs instead of 1") as failure:
        check_outputs([np.zeros((3, 1))] * count, same(["FP64"], [1], batching), 3)
    assert failure.value.code is Code.MODEL


def test_what_travelled_is_counted(segments, folder):
    for way, inline_bytes, segment_bytes in (("inline", 8, 0), ("shared", 0, 8), ("blob", 24, 0)):
        end = ends(same(["FP32"], [1], batching=True), segments, folder, way)
        rows = 6 if way == "blob" else 2
        one = request([floats(*range(rows))], rows)
        packed, lease = end.lease([one])
        reply, body = end.writer.write(lease, end.signature, [floats(*range(rows))], COST)
        assert end.writer.segment_bytes == segment_bytes
        assert len(reply) + len(body) >= inline_bytes
        end.packer.free(packed.slices)


async def received(pool: SegmentPool, values: Sequence[Array], aligned_at: int = 0) -> tuple[SharedBuffers, Request]:
    """A request whose tensors were received into one buffer, one after the other."""
    buffers = SharedBuffers(pool, 1 << 20)
    data = [raw(value) for value in values]
    buffer = buffers.allocate(sum(map(len, data)), aligned_at)
    assert buffer is not None
    view, at, inputs = buffer.bytes_view(), 0, []
    for value, part in zip(values, data, strict=True):
        view[at : at + len(part)] = part
        inputs.append(InputTensor(value.shape, view[at : at + len(part)], len(part)))
        at += len(part)
    return buffers, Request(inputs, len(values[0]), 0, NOW, FAR, DISCARD)


@pytest.mark.anyio
async def test_the_tensors_of_a_lone_request_run_where_they_were_received(folder):
    pool = SegmentPool(folder, "b", 64 << 20)
    end = ends(same(["FP32", "INT64"], [4], batching=True), pool, folder, "shared")
    rng = np.random.default_rng(1)
    values = [array("FP32", (8, 4), rng), array("INT64", (8, 4), rng)]
    buffers, one = await received(pool, values)
    before = pool.in_use_bytes
    packed, lease = end.lease([one])
    outputs = sum(shm.size_bytes for shm in lease.header.output_slots if shm is not None)
    assert pool.in_use_bytes == before + outputs  # nothing for the inputs
    assert packed.segment_bytes == sum(tensor.size_bytes for tensor in one.inputs)
    arrays = input_arrays(lease, end.signature, end.segments)
    assert [got.tobytes() for got in arrays.values()] == [value.tobytes() for value in values]
    del arrays
    one.inputs = ()
    await asyncio.sleep(0)
    assert buffers.in_use_bytes == 0
    assert pool.in_use_bytes == before + outputs  # the batch has it
    end.packer.free(packed.slices)
    assert pool.in_use_bytes == 0
    pool.close()


@pytest.mark.anyio
@pytest.mark.parametrize("reason", ["two requests", "alignment"])
async def test_tensors_that_are_not_an_array_where_they_lie_are_copied(folder, reason):
    pool = SegmentPool(folder, "c", 64 << 20)
    end = ends(same(["FP32"], [4], batching=True), pool, folder, "shared")
    value = array("FP32", (6, 4), np.random.default_rng(2))
    requests = [(await received(pool, [value], int(reason == "alignment")))[1]]
    if reason == "two requests":
        requests.append((await received(pool, [value]))[1])
    packed, lease = end.lease(requests)
    (got,) = input_arrays(lease, end.signature, end.segments).values()
    assert got.tobytes() == value.tobytes() * len(requests)
    del requests
    await asyncio.sleep(0)
    end.packer.free(packed.slices)
    assert pool.in_use_bytes == 0
    pool.close()
