"""Asks another server, at intervals, whether it still serves the models of this worker's instances.

A thread and a connection of their own for each server: an answer never waits behind the tensors of a run, and a server
that is frozen delays no other. One question after the other, since gRPC starts a thread for each call that is not
waited for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

log = logging.getLogger("millstream.triton")

HEALTH_S = 2.0  # interval of the questions
TIMEOUTS_MAX = 2  # questions without an answer until the others of an interval are not asked
SILENT_MAX = 3  # intervals in a row without an answer until a server counts as gone


class Checked(Protocol):
    """An instance that is checked. `lost`: why it cannot run any longer, or ""."""

    lost: str

    def check(self, stub: Any) -> bool:
        """Ask whether the model is ready, in a bounded time, and note the answer; return False if none came."""

    def lose(self, reason: str) -> None:
        """Note that the server is gone, and end the run in progress."""


class ServerHealth:
    """Checks the instances of one server while there are any. Safe for several threads.

    Args:
        connect: opens a connection; returns its stub and what closes it.
    """

    def __init__(self, connect: Callable[[], tuple[Any, Callable[[], None]]], interval_s: float = HEALTH_S) -> None:
        self._connect = connect
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._instances: list[Checked] = []
        self._running = False

    def add(self, instance: Checked) -> None:
        """Check this instance from now on."""
        with self._lock:
            self._changed.clear()  # also if the thread has not noticed yet that there was no instance
            if not self._running:
                threading.Thread(target=self._run, name="triton health", daemon=True).start()
                self._running = True
            self._instances = [*self._instances, instance]

    def remove(self, instance: Checked) -> None:
        """Check this instance no longer."""
        with self._lock:
            self._instances = [one for one in self._instances if one is not instance]
            if not self._instances:
                self._changed.set()

    def _run(self) -> None:
        stub: Any = None
        close: Callable[[], None] | None = None
        silent, problem = 0, ""
        while instances := self._next():
            try:
                if stub is None:
                    stub, close = self._connect()
                silent = 0 if _any_answer(stub, instances) else silent + 1
                if silent >= SILENT_MAX:
                    for one in instances:
                        one.lose("it does not answer")
                if close is not None and any(one.lost for one in instances):
                    close()  # the next question needs a connection that works, perhaps with another CA
                    stub = close = None
                problem = ""
            except Exception as error:  # for example because no more files can be opened now
                if problem != repr(error):
                    log.exception("the models on another server cannot be checked; trying again")
                problem = repr(error)
        if close is not None:
            close()

    def _next(self) -> Sequence[Checked]:
        """Wait until it is time to check, and return the instances; without any, the thread ends."""
        self._changed.wait(self._interval_s)
        with self._lock:
            self._running = bool(self._instances)
            return self._instances


def _any_answer(stub: Any, instances: Sequence[Checked]) -> bool:
    """Check the instances; return False if the server does not answer, for which not all of them are asked."""
    answered, timeouts = False, 0
    for one in instances:
        if one.check(stub):
            answered = True
        else:
            timeouts += 1
            if timeouts == TIMEOUTS_MAX and not answered:
                break
    return answered
