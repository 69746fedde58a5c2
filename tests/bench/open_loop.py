"""Generates an open loop of requests: they arrive at random times whether or not earlier ones were answered.

rate ─> Poisson arrivals ─> a connection that is free, or a new one ─> Answer(sent, seconds, status)
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

import httptools

from tests.bench.errors import LoadError
from tests.bench.load import Payload

CONNECTIONS_MAX = 1000
ANSWER_S_MAX = 30.0


class Answer(NamedTuple):
    """When a request was due, the seconds from then until its answer, and the status."""

    due: float
    seconds: float
    status: int


@dataclass
class Arrivals:
    """Requests of one kind at a `rate` (1/s) for `seconds`; `answers` are in order of arrival."""

    path: str
    payload: Payload
    rate: float
    seconds: float
    answers: list[Answer] = field(default_factory=list)
    #: part of `rate` at an instant, in seconds since the beginning; None: always all of it
    shape: Callable[[float], float] | None = None

    def rate_at(self, seconds: float) -> float:
        """Return the rate (1/s) some seconds after the beginning."""
        return self.rate * (1.0 if self.shape is None else self.shape(seconds))


class _Connection(asyncio.Protocol):
    def __init__(self, free: list[_Connection]) -> None:
        self._free = free
        self._answers: list[Answer] = []
        self._due = 0.0
        self.answered: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def send(self, request: bytes, due: float, answers: list[Answer]) -> asyncio.Future[None]:
        assert self.transport is not None
        self._due, self._answers = due, answers
        self.answered = asyncio.get_running_loop().create_future()
        self.transport.write(request)
        return self.answered

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_complete(self) -> None:
        assert self.answered is not None
        now = asyncio.get_running_loop().time()
        self._answers.append(Answer(self._due, now - self._due, self._parser.get_status_code()))
        if self._parser.should_keep_alive():
            self._free.append(self)
        self._parser = httptools.HttpResponseParser(self)
        self.answered.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._free:
            self._free.remove(self)
        if self.answered is not None and not self.answered.done():
            self.answered.set_exception(LoadError("a connection was closed without an answer"))


async def _send_all(url: str, arrivals: Arrivals, seed: int) -> None:
    loop, choose = asyncio.get_running_loop(), random.Random(seed)
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    body = arrivals.payload.path.read_bytes()
    head = [f"POST {arrivals.path} HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {len(body)}"]
    request = "\r\n".join([*head, *arrivals.payload.headers, "", ""]).encode() + body
    free: list[_Connection] = []
    waiting = 0

    async def ask(due: float) -> None:
        nonlocal waiting
        waiting += 1
        if waiting > CONNECTIONS_MAX:
            raise LoadError(f"{CONNECTIONS_MAX} requests wait for their answers: too slow for this load")
        if free:
            connection = free.pop()
        else:
            _, connection = await loop.create_connection(lambda: _Connection(free), host, port)
        await asyncio.wait_for(connection.send(request, due, arrivals.answers), ANSWER_S_MAX)
        waiting -= 1

    async with asyncio.TaskGroup() as group:
        begin = due = loop.time()
        end = due + arrivals.seconds
        while (due := due + choose.expovariate(arrivals.rate_at(due - begin))) < end:
            await asyncio.sleep(due - loop.time())
            group.create_task(ask(due))
    for connection in free.copy():
        assert connection.transport is not None
        connection.transport.close()


def send(url: str, *kinds: Arrivals) -> None:
    """Send all kinds of requests concurrently and wait for every answer. Raises LoadError."""

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for number, arrivals in enumerate(kinds):
                group.create_task(_send_all(url, arrivals, number))

    try:
        asyncio.run(run())
    except* (OSError, TimeoutError, LoadError) as errors:
        first: BaseException = errors
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        raise LoadError(f"a connection failed under load: {first!r}") from first
