"""spare_memory: memory that work in the background takes while no load needs it.

reserve ─> work ─> free
             └ give_way (a load needs it): the work is stopped, and its memory is free a moment later
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from millstream.services.placement.views import Footprint
from millstream.workers.models.memory_budget import MemoryBudget

GIVE_WAY_S_MAX = 2.0  # that a load waits for stopped work to be gone; then it is tried again
#: For stopped work to be gone; then loads count its memory as taken. It has the lowest priority, also for its end.
GIVING_WAY_S_MAX = 30.0


class SpareMemory:
    """The memory of one kind of work in the background, of which one piece runs at a time. Safe for several threads.

    Args:
        budget: the memory of the worker.
        stop: stops the work in progress, if there is any. Called by the thread that needs the memory.
        monotonic: returns seconds.
    """

    def __init__(
        self, budget: MemoryBudget, stop: Callable[[], None], monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._budget = budget
        self._stop = stop
        self._monotonic = monotonic
        self._freed = threading.Condition()
        budget.spare.append(self)
        self._account = ""  # of the reservation; empty: there is none
        self._asked: float | None = None  # when a load needed the memory first; None: none did

    def asked(self) -> bool:
        """Whether a load needs the memory of the work in progress, which must not go on."""
        return self._asked is not None

    @property
    def giving_way(self) -> bool:
        """Whether memory that a load needs is about to be free."""
        with self._freed:
            asked = self._asked
            return bool(self._account) and asked is not None and self._monotonic() - asked < GIVING_WAY_S_MAX

    def reserve(self, account: str, footprint: Footprint) -> bool:
        """Reserve memory for a piece of work; False if it is not free. `account`: its name in the budget."""
        with self._freed:
            self._asked = None
            reserved = self._budget.reserve(account, footprint)
            self._account = account if reserved else ""
            return reserved

    def free(self) -> None:
        """Return the memory. Called once the processes of the work are gone; calling it again does nothing."""
        with self._freed:
            account, self._account = self._account, ""
            if account:
                self._budget.begin_unload(account)
                self._budget.freed(account)
                self._freed.notify_all()

    def give_way(self) -> bool:
        """Stop the work in progress, and return whether its memory is free now; False also if there was none."""
        with self._freed:
            if not self._account:
                return False
            if self._asked is None:
                self._asked = self._monotonic()
        self._stop()
        with self._freed:
            return self._freed.wait_for(lambda: not self._account, GIVE_WAY_S_MAX)
