"""The orders that gateways and the controller give a worker: load or unload one version. Pure.

gateway (a request came for a version that no worker holds), controller ─> Order ─> orders:<worker> ─> worker
"""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import BaseModel, ConfigDict


class OrderReason(StrEnum):
    """Why the controller orders something: a label of metrics. `Order.why` says it for people."""

    MINIMUM = "minimum"  # fewer instances than instances_min
    DRAIN = "drain"  # its worker stops soon
    LOAD = "load"  # its instances cannot run the calls that arrive
    REGULAR = "regular"  # called regularly: a second instance survives the loss of a worker
    PREFETCH = "prefetch"  # a call is expected
    SPREAD = "spread"  # its worker has more to run than others
    IDLE = "idle"  # without a call for idle_s
    SURPLUS = "surplus"  # more instances than it needs, or than instances_max


class Order(BaseModel):
    """An order to one worker.

    Args:
        why: for people: "a call", "its second instance", "a call is expected", "idle for 300 s", …
        evict: whether other versions may be unloaded for it.
        deadline: instant after which the load is of no use to those who wait, in seconds on the Redis clock; 0: none.
        usage: packed placement.usage.Usage of the version, which the worker continues.
        reason: why the controller gives it: an OrderReason; "": a gateway, or an older release.
        token: fencing token of the controller: a worker ignores orders with a lower token than it has seen. 0: from a
            gateway.
    """

    model_config = ConfigDict(frozen=True)

    do: Literal["load", "unload"]
    content_id: str
    why: str
    evict: bool = False
    deadline: float = 0.0
    usage: dict[str, float] = {}
    reason: str = ""
    token: int = 0
