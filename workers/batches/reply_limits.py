"""Limits of replies: outputs that are too large are detected before any is encoded, and fail only their own requests.

outputs of a lease ─> fit ─> outputs of the requests that fit; the others fail with TOO_LARGE, or run AGAIN alone
a reply that Redis refuses ─> refusal ─> a small reply with an error for each request
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import LENGTH_BYTES
from millstream.services.wire.batch import AGAIN, NO_ROOM, ReplyHeader, encode_reply, too_large

if TYPE_CHECKING:
    from millstream.workers.batches.lease import Lease

Array = np.ndarray[Any, Any]

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
