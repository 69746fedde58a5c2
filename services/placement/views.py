"""The facts that placement decides on: versions, instances and workers, with measured bytes and seconds. Pure.

Instants are seconds on one clock (the Redis clock in a running installation, a virtual one in a simulation).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from millstream.services.placement.usage import NO_USAGE, Usage

UNLIMITED_BYTES = 1 << 62  # free in a worker without a budget


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one instance of a version takes on one kind of device.

    Args:
        resident_bytes: memory that the instance keeps between runs.
        peak_bytes: memory beyond that while it loads, warms up or runs its largest batch.
        load_s: seconds from the order until the instance can serve, warm-up included.
        measured: whether a worker measured it; otherwise it is a prediction.
        device_resident_bytes: likewise of the memory of an accelerator; 0 on a CPU.
        device_peak_bytes: likewise.
    """

    resident_bytes: int
    peak_bytes: int = 0
    load_s: float = 0.0
    measured: bool = False
    device_resident_bytes: int = 0
    device_peak_bytes: int = 0

    @property
    def load_bytes(self) -> int:
        """Bytes that must be free before the load begins."""
        return self.resident_bytes + self.peak_bytes

    @property
    def device_load_bytes(self) -> int:
        """Bytes of the device that must be free before the load begins."""
        return self.device_resident_bytes + self.device_peak_bytes


@dataclass(frozen=True, slots=True)
class PlacedInstance:
    """One instance in a worker, or one that is being loaded.

    Args:
        loaded_at: instant at which it became ready; infinity while it loads.
        in_use: whether it has batches that wait or run.
        pinned: whether its endpoint forbids to unload it.
    """

    content_id: str
    footprint: Footprint
    loaded_at: float
    last_used: float
    in_use: bool = False
    pinned: bool = False
    usage: Usage = NO_USAGE


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as placement sees it.

    Args:
        budget_bytes: memory that the process may use, the interpreter included; 0: no limit.
        used_bytes: memory that is in use, that loads in progress will take, and that is not yet free after an unload.
        draining: whether it stops soon and takes no further instance.
        device_budget_bytes: memory of its accelerator that it may use; 0: it has none, or there is no limit.
        device_used_bytes: likewise in use.
        room_bytes: what all instances together may take of the budget; 0: what is not used by anything else now.
        device_room_bytes: likewise.
        leaving_bytes: what of `used_bytes` is on its way out: of instances that are being unloaded.
        device_leaving_bytes: likewise.
    """

    id: str
    pool: str
    budget_bytes: int
    used_bytes: int
    draining: bool = False
    instances: Mapping[str, PlacedInstance] = field(default_factory=dict)
    device_budget_bytes: int = 0
    device_used_bytes: int = 0
    room_bytes: int = 0
    device_room_bytes: int = 0
    leaving_bytes: int = 0
    device_leaving_bytes: int = 0

    @property
    def free_bytes(self) -> int:
        return max(0, self.budget_bytes - self.used_bytes) if self.budget_bytes else UNLIMITED_BYTES

    @property
    def device_free_bytes(self) -> int:
        return (
            max(0, self.device_budget_bytes - self.device_used_bytes) if self.device_budget_bytes else UNLIMITED_BYTES
        )

    def has_room(self, need: Footprint) -> bool:
        """Return whether a version fits now, in the memory of the host and of the device."""
        return need.load_bytes <= self.free_bytes and need.device_load_bytes <= self.device_free_bytes

    @property
    def loading_s(self) -> float:
        """Predicted seconds of the loads that it has begun, one after the other."""
        return sum(one.footprint.load_s for one in self.instances.values() if one.loaded_at == float("inf"))


class RefusalKind(StrEnum):
    """Why no memory can be made free. Each has an HTTP status of its own in the gateway.

    TOO_LARGE: larger than the budget of every worker, whatever is unloaded. NOTHING_EVICTABLE: all others are pinned or
    needed (503). BUSY: no call waits for it, and what could go is called; a call waits in line instead. TOO_SLOW: the
    load takes longer than the request may wait (429). NO_WORKER: the pool has no worker (503). FAILED: the load was
    tried and failed (503, retry).
    """

    TOO_LARGE = "too_large"
    NOTHING_EVICTABLE = "nothing_evictable"
    BUSY = "busy"
    TOO_SLOW = "too_slow"
    NO_WORKER = "no_worker"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a version is not loaded, in one sentence for the caller, and after which time to try again (0: unknown)."""

    kind: RefusalKind
    reason: str
    retry_after_s: float = 0.0
