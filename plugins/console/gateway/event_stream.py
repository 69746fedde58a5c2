"""Server-sent events: what a server does now, until its reader goes, its key is revoked, or the gateway drains.

Source: WHATWG HTML, "Server-sent events".
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import orjson
from fastapi import Response
from starlette.types import Receive, Scope, Send

from millstream.gateway.access.gate import Gate
from millstream.gateway.access.principal import Principal
from millstream.gateway.connection.drain import ABORT
from millstream.plugins.console.gateway.hub import Hub, Viewer
from millstream.plugins.console.gateway.log_files import LogTail
from millstream.plugins.console.gateway.session import LOGS, WATCH
from millstream.services.errors import Failure
from millstream.services.process.threads import in_storage_thread

_HEAD = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events until it has some kilobytes of them
)
_RETRY = b"retry: 2000\n\n"


class EventStream(Response):
    """A reply that sends the newest sample.

    A reader that is slow skips samples: the next one is looked up when the last one was written.
    """

    def __init__(self, hub: Hub, gate: Gate, principal: Principal | None, tail: LogTail | None = None) -> None:
        """Build one. `principal`: who reads; None: anybody may. `tail`: the lines of logs that they want, too."""
        super().__init__()
        self._tail = tail
        self._hub = hub
        self._gate = gate
        self._principal = principal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(_HEAD)})
        await send({"type": "http.response.body", "body": _RETRY, "more_body": True})
        with self._hub.viewing(self._principal, scope.get(ABORT, _none)) as viewer:
            gone = asyncio.create_task(_end_with_reader(receive, viewer))
            try:
                await self._send_samples(viewer, send)
            finally:
                gone.cancel()
        await send({"type": "http.response.body", "body": b""})

    async def _send_samples(self, viewer: Viewer, send: Send) -> None:
        sent = None
        while not viewer.ended and self._may_still():
            sample = self._hub.sample
            if sample is not None and sample is not sent:
                sent = sample
                body = sample.frame(viewer) + await self._lines()
                await send({"type": "http.response.body", "body": body, "more_body": True})
            await viewer.changed.wait()
            viewer.changed.clear()

    async def _lines(self) -> bytes:
        if self._tail is None:
            return b""
        lines = await in_storage_thread(self._tail.read)
        return b"".join([b"event: log\ndata: %b\n\n" % orjson.dumps(line) for line in lines])

    def _may_still(self) -> bool:
        if self._principal is None:
            return self._gate.is_open(WATCH)
        with suppress(Failure):
            self._gate.check_still(self._principal, WATCH if self._tail is None else LOGS)
            return True
        return False


def _none() -> None:
    """Do nothing: there is no connection."""


async def _end_with_reader(receive: Receive, viewer: Viewer) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    viewer.end()
