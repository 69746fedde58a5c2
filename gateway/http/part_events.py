"""An answer in parts over HTTP: server-sent events, one for each part.

stream ─> the first part, or HOLD_S ─> status 200 ─> event, event, … ─> end          the client goes ─> it is dropped
Until then a refusal has its status; afterwards an error is the last event.
Source: WHATWG HTML, "Server-sent events".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from fastapi import Response
from starlette.types import Receive, Scope, Send

from millstream.gateway.connection.error_reply import internal_failure
from millstream.gateway.http.body import disconnected
from millstream.gateway.scheduling.streams import Stream
from millstream.gateway.tensors.outputs import OutputTensor
from millstream.services.errors import Code, Failure

log = logging.getLogger("millstream.streams")

#: for the first part, before the reply begins without it
HOLD_S = 1.0
#: between two signs of life while no part comes: proxies end what is silent for a minute
HEARTBEAT_S = 15.0
_HEARTBEAT = b": waiting\n\n"
_HEAD = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events until it has some kilobytes of them
)


class PartEvents:
    """Writes the parts of an answer.

    Args:
        stream: the parts; it is closed in the end.
        write: returns the event of a part. Raises Failure.
        write_error: returns the event of a failure.
        last: what ends a stream without a failure.
    """

    def __init__(
        self,
        stream: Stream,
        write: Callable[[list[OutputTensor]], bytes],
        write_error: Callable[[Failure], bytes],
        last: bytes = b"",
    ) -> None:
        self._stream = stream
        self._write = write
        self._write_error = write_error
        self._last = last
        self._next: asyncio.Future[bytes | None] | None = None

    async def response(self, media_type: str) -> Response:
        """Return the reply once it is known that the request is not refused. Raises Failure."""
        try:
            first = await self._event(HOLD_S)
        except BaseException:
            self.close()
            raise
        return _Reply(self, media_type, first)

    async def _event(self, seconds: float) -> bytes | None:
        """Return the next event; a sign of life if none comes in time, None at the end. Raises Failure."""
        if self._next is None:
            self._next = asyncio.ensure_future(self._part())
        done, _ = await asyncio.wait((self._next,), timeout=seconds)
        if not done:
            return _HEARTBEAT
        ready, self._next = self._next, None
        return ready.result()

    async def _part(self) -> bytes | None:
        try:
            return self._write(await anext(self._stream))
        except StopAsyncIteration:
            return None

    async def send(self, first: bytes | None, send: Send) -> None:
        """Send the events."""
        event: bytes | None = first
        try:
            while event is not None:
                await send({"type": "http.response.body", "body": event, "more_body": True})
                event = await self._event(HEARTBEAT_S)
            last = self._last
        except Failure as failure:
            last = self._write_error(failure)
        except OSError:
            raise
        except Exception as error:
            last = self._write_error(internal_failure("a part could not be written", error))
        await send({"type": "http.response.body", "body": last})

    async def end_with(self, receive: Receive) -> None:
        """End the stream when its client goes."""
        await disconnected(receive)
        self._stream.close()

    def close(self) -> None:
        """Drop the request unless it is answered."""
        if self._next is not None:
            self._next.cancel()
        self._stream.close()


class _Reply(Response):
    def __init__(self, events: PartEvents, media_type: str, first: bytes | None) -> None:
        super().__init__()
        self._events = events
        self._first = first
        self._media_type = media_type.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(self._events.end_with(receive))
        try:
            head = [(b"content-type", self._media_type), *_HEAD]
            await send({"type": "http.response.start", "status": 200, "headers": head})
            await self._events.send(self._first, send)
        finally:
            gone.cancel()
            self._events.close()
            with suppress(asyncio.CancelledError):
                await gone


async def only_part(stream: Stream) -> list[OutputTensor]:
    """Return the only part of an answer. Raises Failure, INVALID for an answer of none or several."""
    parts = []
    try:
        async for outputs in stream:
            parts.append(outputs)
            if len(parts) > 1:
                break
    finally:
        stream.close()
    if len(parts) != 1:
        found = "none" if not parts else "several"
        raise Failure(Code.INVALID, f"the answer has one part here, and the model gave {found}: call generate_stream")
    return parts[0]
