"""Infer handlers for tests of the HTTP adapters: one echoes the request, the other lets the test answer."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

import orjson

from millstream.gateway.access.principal import Principal
from millstream.gateway.connection.error_reply import JSON_HEADERS
from millstream.gateway.connection.infer_handler import HttpReply, InferHeaders, reply_headers
from millstream.services.traceparent import Trace

Done = Callable[[HttpReply], None]


class _Nothing:
    def cancel(self) -> None:
        return


class Echo:
    """Echoes the request: the reply's body lists all arguments of `submit`, so equal replies mean equal requests.

    Model `now` is answered before `submit` returns, `large` with a megabyte, `odd` with an unusual status and headers.
    """

    def submit(
        self,
        model: str,
        version: str | None,
        headers: InferHeaders,
        body: bytes | memoryview,
        done: Done,
        request_id: bytes = b"",
        principal: Principal | None = None,
        trace: Trace | None = None,
    ) -> _Nothing:
        text = [None if value is None else value.decode("latin-1") for value in headers]
        echo = orjson.dumps([model, version, text, len(body), hashlib.sha256(body).hexdigest()])
        reply = HttpReply(200, JSON_HEADERS, echo)
        if model == "large":
            reply = HttpReply(200, reply_headers((b"content-type", b"application/octet-stream")), echo.ljust(1 << 20))
        elif model == "odd":
            reply = HttpReply(503, reply_headers((b"content-type", b"text/plain"), (b"retry-after", b"7")), echo)
        if model == "now":
            done(reply)
        else:
            asyncio.get_running_loop().call_soon(done, reply)
        return _Nothing()


class HeldRequest:
    """A request that the test answers. `cancels` counts its cancellations."""

    def __init__(
        self, model: str, version: str | None, headers: InferHeaders, body: bytes | memoryview, done: Done
    ) -> None:
        self.model = model
        self.version = version
        self.headers = headers
        self.body = body
        self.done = done
        self.cancels = 0
        self.cancelled = asyncio.Event()

    def cancel(self) -> None:
        self.cancels += 1
        self.cancelled.set()

    def answer(self, body: bytes = b"{}") -> None:
        """Answer with status 200."""
        self.done(HttpReply(200, JSON_HEADERS, body))


class Held:
    """Keeps requests until the test answers them; requests to the model `now` are answered before `submit` returns."""

    def __init__(self) -> None:
        self.taken = 0
        self._arrived: asyncio.Queue[HeldRequest] = asyncio.Queue()

    def submit(
        self,
        model: str,
        version: str | None,
        headers: InferHeaders,
        body: bytes | memoryview,
        done: Done,
        request_id: bytes = b"",
        principal: Principal | None = None,
        trace: Trace | None = None,
    ) -> HeldRequest:
        held = HeldRequest(model, version, headers, body, done)
        self.taken += 1
        if model == "now":
            held.answer(bytes(body) or b"{}")
        else:
            self._arrived.put_nowait(held)
        return held

    async def next(self) -> HeldRequest:
        """Return the next request, in order of arrival."""
        return await asyncio.wait_for(self._arrived.get(), 120)

    @property
    def empty(self) -> bool:
        return self._arrived.empty()
