"""What is known of a lane, of its batches in flight, and of the workers that have some of them. Data."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

from millstream.gateway.scheduling.request import Request
from millstream.gateway.tensors.inputs import InputTensor
from millstream.services.access.limits import Account
from millstream.services.model.manifest import Manifest
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.wire.batch import ShmSlice


@dataclass(slots=True, eq=False)
class LaneState:
    """What the parts of one lane, and those who watch it, know of it. Instants are seconds on the lane's clock."""

    manifest: Manifest
    content_id: str
    pool: str
    link: ProducerLink  # to the pool's Redis
    failed: str | None = None  # why no instance can serve; None: one can
    #: when a worker tries a version again that it failed to load, in seconds on the Redis clock; 0: none does
    retry_at: float = 0.0
    standby: bool = False  # no worker has loaded the version, and its next request makes one load it
    held: bool = False  # a live worker of the pool has the version, so that batches in flight are answered
    alone: bool = True  # no other pool serves the version
    cold: bool = True  # no instance is ready, or none can serve
    cold_since: float = 0.0
    loaded_at: float = 0.0  # when its first instance became ready, after warm-up runs: as good as a reply
    instances: int = 0  # that are ready
    local_workers: frozenset[str] = frozenset()  # workers on this host that have it ready
    direct_from: float = 0.0  # from when batches may be dispatched to them directly
    in_flight: int = 0  # batches that were put and have no reply yet
    replied_at: float = 0.0  # when the last reply came; 0 before the first
    rows_done: int = 0  # rows whose requests were answered, failed or left, and requests that were refused


@dataclass(slots=True, eq=False)
class InFlightBatch:
    """A batch that was put and has no reply yet. Instants are seconds on the lane's clock."""

    name: str
    lane: LaneState
    requests: list[Request]
    slices: list[ShmSlice]  # shared memory with its tensors
    attempt: int  # 1; 2 and more after a worker died with it
    put_at: float
    run_s: float  # seconds that its run takes by the lane's profile
    losses: int  # how often it, or its reply, was lost on the way before
    earliest: float  # earliest deadline of its requests
    latest: float  # latest deadline of its requests
    inputs: Sequence[InputTensor] = ()  # inputs of its only request, kept after that request was answered
    direct: AttachedWorker | None = None  # the worker that it was dispatched to; None: it is in the queue
    left: bool = False  # its worker was told that all callers have gone
    outlived: list[Account] | None = None  # keys whose calls have ended, and for which its run still counts


@dataclass(slots=True, eq=False)
class AttachedWorker:
    """A worker with a connection over which batches are dispatched."""

    link: socket.socket
    pool: str
    worker: str
    term: int = 0
    attached: bool = False  # whether it takes more batches
    heads: dict[str, bytes] = field(default_factory=dict)  # of messages, by lane, of this term
    outstanding: dict[str, InFlightBatch] = field(default_factory=dict)  # batches that it has, by name
