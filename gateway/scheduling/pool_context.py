"""What all lanes of a pool share in one gateway."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from millstream.gateway.scheduling.admission import Admission
from millstream.gateway.scheduling.coalescing import CpuPressure
from millstream.gateway.scheduling.contention import Contention
from millstream.gateway.scheduling.quarantine import Quarantine
from millstream.gateway.scheduling.traces import Traces
from millstream.services.queue.producer_link import ProducerLink

if TYPE_CHECKING:
    from millstream.gateway.scheduling.in_flight import InFlightBatch
    from millstream.gateway.scheduling.lane import Lane


@dataclass(frozen=True, slots=True)
class PoolContext:
    """`pending`: outstanding batches of the gateway by name. `soon`: calls something in the next turn of the event loop;
    `later`: after so many seconds.

    `rows_waiting_max`: of each lane. `batch_bytes_max`: requests that bring more together share no batch; `reply_bytes_max`:
    nor do rows whose outputs are known to be larger together. `spin_s_max`: how long at most the event loop turns for a
    reply. `circuit_breaker`: counts against a content id what it did, by a name of that. `rest_s`: how long shared memory rests that a frozen worker might still write to. `ticking`: lanes with something
    that time changes; idle lanes cost nothing.
    """

    link: ProducerLink
    pending: dict[str, InFlightBatch]
    admission: Admission
    quarantine: Quarantine
    rows_waiting_max: int
    spin_s_max: float
    rest_s: float
    soon: Callable[[Callable[[], None]], object]
    later: Callable[[float, Callable[[int], None], int], object]
    clock: Callable[[], float] = time.monotonic
    pressure: CpuPressure = field(default_factory=CpuPressure)
    contention: Contention = field(default_factory=Contention)
    traces: Traces = field(default_factory=Traces)
    batch_bytes_max: int = 64 << 20
    reply_bytes_max: int = 256 << 20
    ticking: set[Lane] = field(default_factory=set)
    circuit_breaker: Callable[[str, str], None] = lambda _content_id, _about: None
