"""infer: bytes of a v2 infer request in, bytes of its reply out. Both HTTP adapters call this; it knows neither.

route look-up ─> decode ─> Request ─> lane ……… Reply ─> encode ─> HttpReply
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from gateway.infer_types import Cancel, HttpReply, InferHeaders
from gateway.lane import Lane
from gateway.lanes import Lanes, Route
from gateway.request import Reply, Request
from gateway.v2.call import InferCall
from gateway.v2.compression import choose_encoding, compress, decompress
from gateway.v2.decode import parse_header_length
from gateway.v2.metadata import error_body
from services.errors import Code, Failure

log = logging.getLogger("millrace.infer")

Done = Callable[[HttpReply], None]

JSON = b"application/json"
OCTETS = b"application/octet-stream"
JSON_HEADERS: list[tuple[bytes, bytes]] = [(b"content-type", JSON)]
COMPRESS_BYTES_MIN = 1024  # below this a compressed body is hardly smaller, and both sides pay for it
COMPRESS_INLINE_BYTES_MAX = 64 * 1024  # above this compressing goes to a thread
PACKED_BYTES_MAX = 256 << 20  # of compressed bodies that wait for a thread: they are not admitted yet


def error_reply(failure: Failure) -> HttpReply:
    """A failure as `{"error": …}` with its status, and when to come back."""
    headers = JSON_HEADERS
    if failure.retry_after_s is not None:
        headers = [*JSON_HEADERS, (b"retry-after", b"%d" % max(1, math.ceil(failure.retry_after_s)))]
    return HttpReply(failure.http_status, headers, error_body(failure.message))


def too_large(bytes_max: int) -> Failure:
    """A body over the limit: refused as soon as that is known, whichever adapter reads it."""
    return Failure(Code.TOO_LARGE, f"the request body is larger than the limit of {bytes_max} bytes")


def unexpected(what: str, error: Exception) -> Failure:
    """For an exception that nobody expected: it is logged with an id, and the caller gets the id."""
    error_id = uuid.uuid4().hex[:12]
    log.error("internal error %s: %s", error_id, what, exc_info=error)
    return Failure(Code.INTERNAL, f"internal error {error_id}")


class _Ticket:
    """A request in its lane."""

    __slots__ = ("lane", "request")

    def __init__(self, lane: Lane, request: Request) -> None:
        self.lane = lane
        self.request = request

    def cancel(self) -> None:
        self.lane.cancel(self.request)


class _Deferred:
    """A request whose body is being decompressed in a thread."""

    __slots__ = ("cancelled", "ticket")

    def __init__(self) -> None:
        self.cancelled = False
        self.ticket: Cancel | None = None

    def cancel(self) -> None:
        self.cancelled = True
        if self.ticket is not None:
            self.ticket.cancel()


class _Nothing:
    """Already answered: nothing to cancel."""

    def cancel(self) -> None:
        return


_NOTHING = _Nothing()


class Infer:
    """The InferHandler of a gateway."""

    def __init__(self, lanes: Lanes, body_bytes_max: int, timeout_s_max: float) -> None:
        self._lanes = lanes
        self._body_bytes_max = body_bytes_max
        self._timeout_s_max = timeout_s_max
        self._tasks: set[asyncio.Future[None]] = set()
        self._packed_bytes = 0

    def submit(self, model: str, version: str | None, headers: InferHeaders, body: bytes, done: Done) -> Cancel:
        """Take a request; `done` is called once, maybe before this returns."""
        encoding = headers.content_encoding
        if encoding is None or encoding == b"identity":
            return self._submit(model, version, headers, body, done)
        if self._packed_bytes and self._packed_bytes + len(body) > PACKED_BYTES_MAX:
            full = f"{self._packed_bytes} bytes of compressed bodies wait to be read; try again later"
            done(error_reply(Failure(Code.UNAVAILABLE, full, retry_after_s=1)))
            return _NOTHING
        self._packed_bytes += len(body)
        deferred = _Deferred()
        self._spawn(self._decompress(deferred, encoding, model, version, headers, body, done))
        return deferred

    def _submit(self, model: str, version: str | None, headers: InferHeaders, body: bytes, done: Done) -> Cancel:
        try:
            route = self._lanes.routes.get((model, version))
            if route is None:
                raise self._lanes.unknown(model, version)
            length = headers.header_length
            call = route.decoder.decode(body, None if length is None else parse_header_length(length))
            now = time.monotonic()
            timeout_s = route.timeout_s if call.timeout_s is None else min(call.timeout_s, self._timeout_s_max)
            request = Request(
                call.inputs,
                call.rows,
                call.priority,
                now,
                now + timeout_s,
                partial(self._reply, route, call, headers.accept_encoding, done),
            )
            route.lane.add(request, len(body))
        except Failure as failure:
            if route is not None:
                route.lane.turned_away(failure.code)
            done(error_reply(failure))
            return _NOTHING
        except Exception as error:
            done(error_reply(unexpected(f"an infer request for {model!r}", error)))
            return _NOTHING
        return _Ticket(route.lane, request)

    def _reply(
        self, route: Route, call: InferCall, accept_encoding: bytes | None, done: Done, result: Reply | Failure
    ) -> None:
        try:
            if isinstance(result, Failure):
                raise result
            body, header_length = route.encoder.encode(call, result)
        except Failure as failure:
            done(error_reply(failure))
            return
        except Exception as error:
            done(error_reply(unexpected("a reply could not be written", error)))
            return
        if header_length is None:
            headers = JSON_HEADERS
        else:
            headers = [(b"content-type", OCTETS), (b"inference-header-content-length", b"%d" % header_length)]
        if accept_encoding is not None and len(body) >= COMPRESS_BYTES_MIN:
            self._compress(accept_encoding, HttpReply(200, headers, body), done)
        else:
            done(HttpReply(200, headers, body))

    def _compress(self, accept_encoding: bytes, reply: HttpReply, done: Done) -> None:
        encoding = choose_encoding(accept_encoding)
        if encoding is None:
            done(reply)
        elif len(reply.body) <= COMPRESS_INLINE_BYTES_MAX:
            done(_compressed(reply, encoding))
        else:
            self._spawn(self._compress_in_thread(reply, encoding, done))

    async def _compress_in_thread(self, reply: HttpReply, encoding: bytes, done: Done) -> None:
        try:
            compressed = await asyncio.to_thread(_compressed, reply, encoding)
        except Exception as error:
            compressed = error_reply(unexpected("a reply could not be compressed", error))
        done(compressed)

    async def _decompress(
        self,
        deferred: _Deferred,
        encoding: bytes,
        model: str,
        version: str | None,
        headers: InferHeaders,
        body: bytes,
        done: Done,
    ) -> None:
        """In a thread: a small body can become a large one, and the neighbours must not wait for it."""
        failure = None
        try:
            plain = await asyncio.to_thread(decompress, body, encoding, self._body_bytes_max)
        except Failure as error:
            failure = error
        except Exception as error:
            failure = unexpected("a body could not be decompressed", error)
        finally:
            self._packed_bytes -= len(body)
        if deferred.cancelled:
            return
        if failure is not None:
            done(error_reply(failure))
        else:
            deferred.ticket = self._submit(model, version, headers, plain, done)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _compressed(reply: HttpReply, encoding: bytes) -> HttpReply:
    return HttpReply(reply.status, [*reply.headers, (b"content-encoding", encoding)], compress(reply.body, encoding))
