"""What the lanes of one pool share in this gateway."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from millstream.gateway.access.gate import Gate
from millstream.gateway.observing.recorder import BatchSink, Recorder
from millstream.gateway.observing.timing import BatchTiming
from millstream.gateway.placement.demands import ColdLane, ColdRequest
from millstream.gateway.scheduling.admission import Admission
from millstream.gateway.scheduling.attached_workers import AttachedWorkers
from millstream.gateway.scheduling.batching.coalescing import CpuPressure
from millstream.gateway.scheduling.batching.dispatch import Contention
from millstream.gateway.scheduling.lane_state import InFlightBatch, LaneState
from millstream.gateway.scheduling.quarantine import Quarantine
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.segments.pool import SegmentPool
from millstream.services.wire.batch import ReplyHeader


class SharedParts(NamedTuple):
    """What the lanes of all pools share.

    `segments`: shared memory for large tensors; None: all tensors go through Redis. `gate`: tells whether runs are
    charged to keys.
    """

    admission: Admission
    segments: SegmentPool | None
    quarantine: Quarantine
    gate: Gate
    recorder: Recorder


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
    link: ProducerLink  # to the pool's Redis
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
    direct: AttachedWorkers | None = None  # idle workers on this host; None: all batches take the queue
    timed: set[LaneState] = field(default_factory=set)  # as in LaneTable, as is the next one
    used: set[LaneState] = field(default_factory=set)
    early: set[LaneState] = field(default_factory=set)  # cold lanes with a request ahead (scheduling/early_put.py)
