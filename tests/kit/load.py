"""Generates constant load: each caller has a connection of its own, and sends a request a moment after each answer."""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

WAIT_S = 240.0
#: Between an answer and the next request. Without it a few callers keep two cores busy, and other tests waiting.
PAUSE_S = 0.01
#: A caller whose next request comes later than this opens a new connection: a server that drains closes idle ones.
IDLE_S_MAX = 1.0


class Answer(NamedTuple):
    """An answer on connection `caller`; `sent` is the index of the request's body in the list of bodies."""

    caller: int
    sent: int
    status: int
    headers: dict[str, str]
    body: bytes
    at: float  # monotonic


class Load:
    """A running load. `answers` are in order of arrival; those of one caller are in the order of its requests."""

    def __init__(
        self, port: int, path: str, bodies: Sequence[tuple[bytes, dict[str, str]]], callers: int, pause_s: float
    ) -> None:
        self.answers: list[Answer] = []
        self._port = port
        self._path = path
        self._bodies = bodies
        self._pause_s = pause_s
        self._moved = threading.Condition()
        self._stopping = threading.Event()
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._call, args=(i,), name=f"caller {i}") for i in range(callers)]

    def until(self, true: Callable[[], object], timeout_s: float = WAIT_S) -> None:
        """Wait until `true` holds; it is called after each answer."""
        with self._moved:
            in_time = self._moved.wait_for(lambda: self._errors or true(), timeout_s)
        if self._errors:
            raise AssertionError(f"a caller got no answer: {self._errors[0]!r}") from self._errors[0]
        assert in_time, f"not within {timeout_s:g} s, after {len(self.answers)} answers"

    def more(self, answers: int) -> None:
        """Wait for this many answers to requests that are sent from now on."""
        seen = len(self.answers) + len(self._threads)  # each caller may have a request in flight
        self.until(lambda: len(self.answers) >= seen + answers)

    def _call(self, caller: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=WAIT_S)
        sent, answered_at = caller, time.monotonic()
        try:
            while not self._stopping.is_set():
                number = sent % len(self._bodies)
                body, headers = self._bodies[number]
                if time.monotonic() > answered_at + IDLE_S_MAX:
                    connection.close()
                connection.request("POST", self._path, body, headers)
                reply = connection.getresponse()
                status, received, content = reply.status, dict(reply.getheaders()), reply.read()
                answered_at = time.monotonic()
                answer = Answer(caller, number, status, received, content, answered_at)
                with self._moved:
                    self.answers.append(answer)
                    self._moved.notify_all()
                sent += len(self._threads)
                if self._pause_s:
                    self._stopping.wait(self._pause_s)
        except BaseException as error:
            with self._moved:
                self._errors.append(error)
                self._moved.notify_all()
        finally:
            connection.close()


@contextmanager
def constant_load(
    port: int,
    path: str,
    bodies: Sequence[tuple[bytes, dict[str, str]]],
    callers: int = 8,
    pause_s: float = PAUSE_S,
) -> Iterator[Load]:
    """Send `bodies` in turn until the end of the block; yields the load. A request without an answer is an error."""
    load = Load(port, path, bodies, callers, pause_s)
    for thread in load._threads:
        thread.start()
    try:
        yield load
    finally:
        load._stopping.set()
        for thread in load._threads:
            thread.join(WAIT_S)
    load.until(lambda: True)
