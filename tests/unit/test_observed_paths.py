"""What is kept of the path of a request is bounded: thousands of them wait while a collector or a disk hangs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from millstream.gateway.observing.finished import PATH_MAX, Finished
from millstream.gateway.observing.observed_app import ObservedApp
from millstream.gateway.observing.observed_protocol import with_observer
from millstream.gateway.observing.observer import Observer

LONG = "x" * 60_000


class Kept:
    """Keeps all requests."""

    def __init__(self) -> None:
        self.requests: list[Finished] = []

    def wants(self, _: Finished) -> bool:
        return True

    def add(self, request: Finished) -> None:
        self.requests.append(request)


def test_the_path_of_a_route() -> None:
    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404})

    async def nothing(*_: Any) -> None:
        return

    kept = Kept()
    scope = {"type": "http", "headers": [], "method": "POST", "path": f"/{LONG}"}
    asyncio.run(ObservedApp(app, Observer([kept], traced=True))(scope, nothing, nothing))
    (request,) = kept.requests
    assert (request.status, len(request.path)) == (404, PATH_MAX)


def test_the_path_of_the_fast_path() -> None:
    class Protocol:
        client = ("127.0.0.1", 1)

    kept = Kept()
    connection: Any = with_observer(Protocol, Observer([kept], traced=False))()
    headers = SimpleNamespace(traceparent=None)
    cycle = SimpleNamespace(path=(LONG, "1"), submitted_at=1.0, request_id=b"r", headers=headers)
    connection._finished(cycle, None, 404, 0)
    (request,) = kept.requests
    assert len(request.path) == PATH_MAX
