"""What the parts of a worker's residency share, and the lock under which they decide."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

from millstream.services.wire.orders import Order
from millstream.workers.models.wanted import Wanted


@dataclass(slots=True, eq=False)
class ResidencyState:
    """The versions of one worker's pool, and the orders that the worker gives itself.

    Args:
        changed: locked while deciding; notified when `wanted` changes, and when an instance was closed.
        wanted: the versions that the repository has for the pool, by content id.
        put_away: content ids that were unloaded, or not loaded, for want of memory or of calls: not preloaded.
        again: orders that this worker gives itself.
        ended: content ids whose demands end without a lane.
        learnt: whether preloads are to be chosen again: a load ended, or quotas changed.
    """

    changed: threading.Condition
    wanted: dict[str, Wanted] = field(default_factory=dict)
    put_away: set[str] = field(default_factory=set)
    again: deque[Order] = field(default_factory=deque)
    ended: deque[str] = field(default_factory=deque)
    learnt: bool = False
