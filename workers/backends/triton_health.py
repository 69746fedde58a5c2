"""A thread that asks other servers, at intervals, whether they still serve the models of this worker's instances."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

HEALTH_S = 2.0  # interval of the questions


class Checked(Protocol):
    """What is checked."""

    def ask(self) -> Callable[[], None]:
        """Send a question to the server, without waiting. The result waits for the answer, for a bounded time."""


class HealthThread:
    """Checks instances while there are any. Safe for several threads."""

    def __init__(self, interval_s: float = HEALTH_S) -> None:
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._instances: list[Checked] = []
        self._running = False

    def add(self, instance: Checked) -> None:
        """Check this instance from now on."""
        with self._lock:
            self._instances.append(instance)
            if not self._running:
                self._running = True
                self._changed.clear()
                threading.Thread(target=self._run, name="triton health", daemon=True).start()

    def remove(self, instance: Checked) -> None:
        """Check this instance no longer."""
        with self._lock:
            self._instances = [one for one in self._instances if one is not instance]
            if not self._instances:
                self._changed.set()

    def _run(self) -> None:
        while True:
            self._changed.wait(self._interval_s)
            with self._lock:
                instances = self._instances
                if not instances:
                    self._running = False
                    return
            # All at once: each answer of a frozen server takes the whole time.
            for receive in [instance.ask() for instance in instances]:
                receive()
