"""What is known of a lane, of its batches in flight, and what the lanes of one pool share in a gateway. Data."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from millstream.gateway.access.gate import Gate
from millstream.gateway.observing.finished import BatchTiming
from millstream.gateway.observing.observer import BatchSink, Observer, Recorder
from millstream.gateway.placement.demands import ColdLane, ColdRequest
from millstream.gateway.scheduling.batching.coalescing import CpuPressure
from millstream.gateway.scheduling.batching.dispatch import Contention, DispatchPolicy
from millstream.gateway.scheduling.lane_metrics import LaneMetrics
from millstream.gateway.scheduling.packer import Packer
from millstream.gateway.scheduling.quarantine import Quarantine
from millstream.gateway.scheduling.request import Admission, Request
from millstream.gateway.tensors.input_plans import InputPlans
from millstream.gateway.tensors.inputs import InputTensor
from millstream.gateway.tensors.prepared import PreparedPlans
from millstream.services.access.limits import Account
from millstream.services.model.manifest import Manifest
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.segments.pool import SegmentPool
from millstream.services.wire.batch import ReplyHeader, ShmSlice


@dataclass(slots=True, eq=False)
class LaneState:
    """What the parts of one lane, and those who watch it, know of it. Instants are seconds on the lane's clock."""

    manifest: Manifest
    context: PoolContext
    packer: Packer
    metrics: LaneMetrics
    policy: DispatchPolicy  # batch sizes and credits
    content_id: str = field(init=False)
    pool: str = field(init=False)
    link: ProducerLink = field(init=False)  # the connection to the pool's Redis
    clock: Callable[[], float] = field(init=False)
    failed: str | None = None  # why no instance can serve; None: one can
    #: when a worker tries a version again that it failed to load, in seconds on the Redis clock; 0: none does
    retry_at: float = 0.0
    standby: bool = False  # no worker has loaded the version, and its next request makes one load it
    held: bool = False  # a live worker of the pool has the version, so that batches in flight are answered
    alone: bool = True  # no other pool serves the version
    cold: bool = True  # no instance is ready, or none can serve
    cold_since: float = 0.0
    loaded_at: float = 0.0  # when its first instance became ready, after warm-up runs: as good as a reply
    instances: int = 0  # ready ones
    local_workers: frozenset[str] = frozenset()  # workers on this host that have it ready
    direct_from: float = 0.0  # batches take the queue until this instant
    in_flight: int = 0  # batches that were put and have no reply yet
    replied_at: float = 0.0  # when the last reply came; 0 before the first
    rows_done: int = 0  # rows whose requests were answered, failed or left, and requests that were refused

    def __post_init__(self) -> None:
        self.content_id = self.manifest.content_id
        self.pool, self.link, self.clock = self.context.pool, self.context.link, self.context.clock


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
    heads: dict[str, bytes] = field(default_factory=dict)  # heads of this term's messages, by lane
    outstanding: dict[str, InFlightBatch] = field(default_factory=dict)  # batches that it has, by name


class SharedParts(NamedTuple):
    """What the lanes of all pools share.

    `segments`: shared memory for large tensors; None: all tensors go through Redis. `gate`: tells whether runs are
    charged to keys. `runner_of`: makes what runs the requests of a composed version; it blocks.
    `prepared_of`: of a version and its own plans, those of requests that give texts or encoded files.
    """

    admission: Admission
    segments: SegmentPool | None
    quarantine: Quarantine
    gate: Gate
    recorder: Recorder
    runner_of: Callable[[Manifest, Any], Any]  # scheduling/composed.py, which stands on lanes, has the types
    prepared_of: Callable[[Manifest, InputPlans], PreparedPlans | None] = lambda *_: None


class LaneOwner(Protocol):
    """What lanes ask of the router, which opened them."""

    def load_for(self, lane: ColdLane, request: ColdRequest) -> None:
        """Have the version of a lane without instances loaded for a request, or raise Failure."""

    def load_again(self, lane: ColdLane) -> None:
        """Have the version of a lane loaded again, whose last instance went while requests were on their way."""

    def blame(self, pool: str, content_id: str, event: str) -> None:
        """Count an event against a version. `event` names it, so that it counts once for all gateways."""

    def has_workers(self, pool: str) -> bool:
        """Return whether a pool has a live worker."""

    def reads_newest(self, pool: str) -> bool:
        """Return whether all live workers of a pool, at least one, read the newest batch format."""


@dataclass(frozen=True, slots=True)
class PoolContext:
    """The parts and limits that the lanes of one pool share. Times are seconds."""

    pool: str  # its name
    link: ProducerLink  # the connection to the pool's Redis
    pending: dict[str, InFlightBatch]  # the gateway's batches in flight, by name
    admission: Admission
    quarantine: Quarantine
    gate: Gate  # tells whether runs are charged to keys
    owner: LaneOwner
    rows_waiting_max: int  # limit on the waiting rows of each lane
    spin_s_max: float  # longest time that the event loop busy-polls for a reply
    rest_s: float  # cool-down of shared memory that a frozen worker may still write to
    soon: Callable[[Callable[[], None]], object]  # schedules a function for the next turn of the event loop
    later: Callable[[float, Callable[[int], None], int], object]  # schedules a call after some seconds
    clock: Callable[[], float] = time.monotonic
    pressure: CpuPressure = field(default_factory=CpuPressure)
    contention: Contention = field(default_factory=Contention)
    recorders: tuple[BatchSink, ...] = ()  # record batches that have their replies
    batch_bytes_max: int = 64 << 20  # limit on the requests of a batch; a larger one is sent alone
    reply_bytes_max: int = 256 << 20  # limit on the outputs of a batch, if their size is known
    #: makes the timing of a batch, which its requests get; None: they get none
    timing: Callable[[ReplyHeader, float, float, int], BatchTiming] | None = None
    observer: Observer | None = None  # says whether batches get a timing; None: they always do
    #: sends a batch to an idle worker on this host (DirectDispatch.send); None: all batches take the queue
    direct: Callable[[InFlightBatch, bytes, int], bool] | None = None
    timed: set[LaneState] = field(default_factory=set)  # as in LaneTable, as is the next one
    used: set[LaneState] = field(default_factory=set)
    early: set[LaneState] = field(default_factory=set)  # cold lanes with a request ahead (EarlyPut)
