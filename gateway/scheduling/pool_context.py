"""What the lanes of one pool share in this gateway."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millstream.gateway.observing.timing import BatchTiming
from millstream.gateway.scheduling.admission import Admission
from millstream.gateway.scheduling.batching.coalescing import CpuPressure
from millstream.gateway.scheduling.batching.contention import Contention
from millstream.gateway.scheduling.batching.run_costs import RunCosts
from millstream.gateway.scheduling.direct_dispatch import DirectDispatch
from millstream.gateway.scheduling.quarantine import Quarantine
from millstream.plugins.compat.triton.traces import Traces
from millstream.services.queue.producer_link import ProducerLink
from millstream.services.wire.batch import ReplyHeader

if TYPE_CHECKING:
    from millstream.gateway.scheduling.in_flight import InFlightBatch
    from millstream.gateway.scheduling.lane import Lane
    from millstream.gateway.scheduling.request import Request


@dataclass(frozen=True, slots=True)
class PoolContext:
    """The parts and limits that the lanes of one pool share. Times are seconds."""

    pool: str  # its name
    link: ProducerLink  # to the pool's Redis
    pending: dict[str, InFlightBatch]  # the gateway's batches in flight, by name
    admission: Admission
    quarantine: Quarantine
    rows_waiting_max: int  # limit on the waiting rows of each lane
    spin_s_max: float  # longest time that the event loop busy-polls for a reply
    rest_s: float  # cool-down of shared memory that a frozen worker may still write to
    soon: Callable[[Callable[[], None]], object]  # schedules a function for the next turn of the event loop
    later: Callable[[float, Callable[[int], None], int], object]  # schedules a call after some seconds
    clock: Callable[[], float] = time.monotonic
    pressure: CpuPressure = field(default_factory=CpuPressure)
    contention: Contention = field(default_factory=Contention)
    traces: Traces = field(default_factory=Traces)
    costs: RunCosts = field(default_factory=RunCosts)
    batch_bytes_max: int = 64 << 20  # limit on the requests of a batch; a larger one is sent alone
    reply_bytes_max: int = 256 << 20  # limit on the outputs of a batch, if their size is known
    #: makes the timing of a batch, which its requests get; None: they get none
    timing: Callable[[ReplyHeader, float, float, int], BatchTiming] | None = None
    direct: DirectDispatch | None = None  # dispatches to idle workers on this host; None: all batches take the queue
    ticking: set[Lane] = field(default_factory=set)  # lanes that wait for an instant; others cost the expirer nothing
    called: set[Lane] = field(default_factory=set)  # lanes that got a batch or refused a request since the last report
    #: counts an event (second argument: its name) against a content id (first argument)
    circuit_breaker: Callable[[str, str], None] = lambda _content_id, _event: None
    #: has the version of a lane without instances loaded for a request, or raises Failure
    load_for: Callable[[Lane, Request], None] = lambda _lane, _request: None
    #: has the version of a lane loaded again, whose last instance went while requests were on their way
    load_again: Callable[[Lane], None] = lambda _lane: None
    staffed: Callable[[], bool] = lambda: True  # whether the pool has a live worker
    #: whether all live workers of the pool, at least one, read the newest batch format
    reads_newest: Callable[[], bool] = lambda: False
    early: set[Lane] = field(default_factory=set)  # cold lanes with a request ahead (scheduling/early_put.py)
