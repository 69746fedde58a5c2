"""The orders that gateways and the controller give a worker: load or unload one version. Pure.

gateway (a request came for a version that no worker holds), controller ─> Order ─> orders:<worker> ─> worker
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict


class Order(BaseModel):
    """An order to one worker.

    Args:
        why: for people: "a call", "its second instance", "a call is expected", "idle for 300 s", …
        evict: whether other versions may be unloaded for it.
        deadline: instant after which the load is of no use to those who wait, in seconds on the Redis clock; 0: none.
        usage: packed placement.usage.Usage of the version, which the worker continues.
        reason: why the controller gives it: a placement.planned.OrderReason; "": a gateway, or an older release.
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
