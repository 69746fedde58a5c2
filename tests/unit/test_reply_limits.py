"""Outputs that are too large: who is told so, who is answered, and who is run again.

And requests that come together.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.gateway.scheduling.dispatcher import parts_within
from millstream.gateway.scheduling.request import Request
from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import encode_elements
from millstream.services.queue.blob import PART_BYTES_MAX, PARTS_AT_ONCE, is_last, read_command, write_commands
from millstream.services.wire.batch import AGAIN, BatchHeader, decode_reply, encode_batch
from millstream.workers.batches.lease import Lease, fit, refusal
from tests.kit.responders import DISCARD

Array = np.ndarray[Any, Any]


def lease_of(*rows: int) -> Lease:
    header = BatchHeader("b", b"replies", 0.0, list(rows), [1e15] * len(rows), [], [], "")
    return Lease("m", b"1-0", encode_batch(header, []), 1)


def codes(lease: Lease) -> dict[int, str]:
    return {position: code for position, (code, _) in lease.failures.items()}


def test_what_fits_is_left_as_it_is() -> None:
    lease, outputs = lease_of(1, 2), [np.zeros((3, 4), np.float32)]
    kept, refused = fit(lease, outputs, True, 48)
    assert kept is outputs
    assert (refused, lease.failures, lease.live_requests) == (0, {}, [0, 1])


def test_the_request_at_fault_alone_is_told_so() -> None:
    lease = lease_of(1, 5, 2)
    lease.live_requests.remove(0)  # it had failed before
    column = np.arange(7, dtype=np.float32).reshape(7, 1)
    kept, refused = fit(lease, [column, column.astype(np.int64)], True, 30)
    assert (refused, codes(lease), lease.live_requests) == (1, {1: Code.TOO_LARGE}, [2])
    assert kept is not None
    np.testing.assert_array_equal(kept[0], [[5], [6]])
    assert "60 bytes, more than the 30" in lease.failures[1][1]
    assert "MILLSTREAM_REPLY_BYTES_MAX" in lease.failures[1][1]


def test_requests_that_are_too_large_together_run_again() -> None:
    lease = lease_of(1, 1, 1)
    kept, refused = fit(lease, [np.zeros((3, 10), np.uint8)], True, 20)
    assert (refused, codes(lease), lease.live_requests) == (0, {2: AGAIN}, [0, 1])
    assert kept is not None
    assert kept[0].shape == (2, 10)


@pytest.mark.parametrize("shape", [(), (4,), (0, 3), (2, 0)])
def test_an_output_without_rows_is_one_requests(shape: tuple[int, ...]) -> None:
    output = np.zeros(shape, np.float64)
    kept, _ = fit(lease_of(1), [output], False, output.nbytes)
    assert kept is not None
    if output.nbytes:
        lease = lease_of(1)
        assert fit(lease, [output], False, output.nbytes - 1) == (None, 1)
        assert codes(lease) == {0: Code.TOO_LARGE}


@given(
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=6),
    texts=st.booleans(),
    width=st.integers(0, 3),
    bytes_max=st.integers(0, 60),
    seed=st.integers(0, 1000),
)
def test_every_request_has_one_fate_and_what_is_kept_fits(
    rows: list[int], texts: bool, width: int, bytes_max: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    array = np.empty((sum(rows), width), object if texts else np.uint8)
    array[...] = (
        np.array([rng.bytes(int(rng.integers(0, 4))) for _ in range(array.size)] or [b""], object)[
            : array.size
        ].reshape(array.shape)
        if texts
        else rng.integers(0, 9, array.shape)
    )

    def size(part: Array) -> int:
        return len(encode_elements(part.reshape(-1).tolist())) if texts else part.nbytes

    lease = lease_of(*rows)
    bounds = np.cumsum([0, *rows])
    shares = [array[a:b] for a, b in itertools.pairwise(bounds)]
    kept, refused = fit(lease, [array], True, bytes_max)
    assert sorted([*lease.live_requests, *lease.failures]) == list(range(len(rows)))
    wanted = [shares[i] for i in lease.live_requests]
    if kept is not None:
        assert kept[0].tolist() == [row for share in wanted for row in share.tolist()]
        assert size(kept[0]) <= bytes_max
    else:
        assert not lease.live_requests
    too_large = [i for i, code in codes(lease).items() if code == Code.TOO_LARGE]
    assert too_large == [i for i, share in enumerate(shares) if size(share) > bytes_max]
    assert refused == len(too_large)
    if AGAIN in codes(lease).values():
        assert kept is not None, "a version that runs again made room for another"


def test_a_refusal_is_small_and_tells_every_request() -> None:
    lease = lease_of(1, 2, 3)
    lease.fail(1, Code.MODEL, "its own")
    decoded = decode_reply(refusal(lease, "w", Failure(Code.UNAVAILABLE, "no memory")))
    assert not isinstance(decoded, str)
    header, inline = decoded
    assert header.failures == {
        0: ["unavailable", "no memory"],
        1: ["model", "its own"],
        2: ["unavailable", "no memory"],
    }
    assert (header.outputs, header.blob, len(inline)) == ([], "", 0)


@given(size=st.sampled_from([1, PART_BYTES_MAX - 1, PART_BYTES_MAX, PART_BYTES_MAX + 1, 5 * PART_BYTES_MAX // 2]))
def test_a_blob_is_written_in_parts_that_every_server_takes(size: int) -> None:
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    commands = list(write_commands(b"k", data, 1000))
    parts = [command[2] for command in commands if command[0] == "RPUSH"]
    assert all(isinstance(part, bytes) and 0 < len(part) <= PART_BYTES_MAX for part in parts)
    assert b"".join(part for part in parts if isinstance(part, bytes)) == data
    # what is there at all has an expiry
    assert [command[0] for command in commands[:5]] == ["MULTI", "DEL", "RPUSH", "PEXPIRE", "EXEC"]


@given(count=st.integers(0, 3 * PARTS_AT_ONCE), last=st.sampled_from([1, PART_BYTES_MAX]))
def test_a_blob_is_read_to_its_end(count: int, last: int) -> None:
    stored = [bytes(PART_BYTES_MAX)] * (count - 1) + [bytes(last)] * bool(count)
    read: list[bytes] = []
    while True:
        _, _, start, stop = read_command(b"k", len(read))
        assert isinstance(start, int)
        assert isinstance(stop, int)
        got = stored[start : stop + 1]
        read += got
        if not got or is_last(got):
            break
    assert list(map(len, read)) == list(map(len, stored))


@given(sizes=st.lists(st.integers(0, 9), min_size=1, max_size=8), bytes_max=st.integers(1, 12))
def test_a_batch_is_cut_where_it_is_too_large(sizes: list[int], bytes_max: int) -> None:
    batch = [Request((), 1, 0, 0.0, 1.0, DISCARD) for _ in sizes]
    for request, size in zip(batch, sizes, strict=True):
        request.permit_bytes = size
    parts = list(parts_within(batch, bytes_max))
    assert [request for part in parts for request in part] == batch
    for part, following in zip(parts, [*parts[1:], None], strict=True):
        total = sum(request.permit_bytes for request in part)
        assert total <= bytes_max or len(part) == 1
        assert following is None or total + following[0].permit_bytes > bytes_max
