"""responder: writes the outputs of a batch as the replies to its v2 REST requests.

answer ─> same options? ──yes──> all bodies at once ─┬─> (compress) ─> done(HttpReply)
             └──no──> body by body ─────────────────┘
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import lru_cache
from typing import Any, cast

from millstream.gateway.connection.budgets import ReplyBudget
from millstream.gateway.connection.error_reply import JSON_HEADERS, error_reply, internal_failure
from millstream.gateway.connection.infer_handler import HttpReply, ReplyHeaders, reply_headers
from millstream.gateway.http.compression import choose_encoding, compress
from millstream.gateway.observing.timing import BatchTiming, server_timing
from millstream.gateway.scheduling.load_report import HEADER, load_report, wanted_format
from millstream.gateway.scheduling.request import FORM_HEADER, Request, RequestLane, served_by
from millstream.gateway.tensors.outputs import Outputs, Reply, own_copies, size_of
from millstream.gateway.v2.call import Options
from millstream.gateway.v2.encode import V2Encoder
from millstream.services.errors import Failure
from millstream.services.metrics.catalogue import RequestProtocol
from millstream.services.process.offload import run_in_thread_if_large

log = logging.getLogger("millstream.infer")

Done = Callable[[HttpReply], None]

OCTETS = b"application/octet-stream"
#: outputs of a batch from this size on are written in a thread: writing their text would block the event loop
LARGE_BYTES_MIN = 256 * 1024
COMPRESS_BYTES_MIN = 1024  # below this a compressed body is hardly smaller and costs both sides time
COMPRESS_INLINE_BYTES_MAX = 64 * 1024  # a larger body is compressed in a thread

#: Makes a NamedTuple in a third of the time that its constructor takes.
_new = tuple.__new__


class RestRequest(Request):
    """A request of v2 REST: the options that its reply depends on, and the function that takes the reply."""

    options: Options
    accept_encoding: bytes | None
    load_format: bytes | None = None
    done_with: Done

    @property
    def id(self) -> str:
        return self.options.id

    def cancel(self) -> None:
        """Drop the request unless it has left the lane; it gets no reply."""
        self.lane.cancel(self)


class RestResponder:
    """Answers the requests of one version, all of which are RestRequests.

    Args:
        encoder: the version's encoder.
        reply_budget: bounds large replies while they are written.
    """

    protocol = RequestProtocol.V2

    def __init__(self, encoder: V2Encoder, reply_budget: ReplyBudget) -> None:
        self._encoder = encoder
        self._reply_budget = reply_budget
        self._tasks: set[asyncio.Future[None]] = set()

    def answer(self, requests: Sequence[Request], outputs: Outputs) -> None:
        mine = cast("Sequence[RestRequest]", requests)
        options = mine[0].options
        written = None
        large = outputs.size_bytes >= LARGE_BYTES_MIN
        alike = all([request.options is options for request in mine])  # noqa: C419 - a list is faster here
        if alike and (not large or self._encoder.all_raw(options)):
            try:
                written = self._encoder.encode_all(options, outputs, len(mine))
            except Exception:
                log.exception("replies could not be written at once")
        if written is None:
            write = self._write_large if large else self._write
            for request, reply in zip(mine, outputs.replies([request.rows for request in mine]), strict=True):
                write(request, reply)
            return
        bodies, header_length = written
        headers = _headers(header_length)
        for request, body in zip(mine, bodies, strict=True):
            self._send(request, headers, body)

    def answer_one(self, request: Request, reply: Reply) -> None:
        mine = cast("RestRequest", request)
        (self._write_large if size_of(reply) >= LARGE_BYTES_MIN else self._write)(mine, reply)

    def _write(self, mine: RestRequest, reply: Reply) -> None:
        try:
            body, header_length = self._encoder.encode(mine.options, reply)
        except Failure as failure:
            self.fail(mine, failure)
        except Exception as error:
            mine.done_with(error_reply(internal_failure("a reply could not be written", error)))
        else:
            self._send(mine, _headers(header_length), body)

    def _write_large(self, mine: RestRequest, reply: Reply) -> None:
        """Write a large reply if the reply budget has room: numbers as text in a thread, raw bytes here."""
        size_bytes = size_of(reply)
        if not self._reply_budget.has_room(size_bytes):
            self.fail(mine, self._reply_budget.refusal())
        elif mine.options.output_options is not None or self._encoder.all_raw(mine.options):
            self._write(mine, reply)
        else:
            self._reply_budget.take(size_bytes)
            self._spawn(self._write_in_thread(mine, own_copies(reply), size_bytes))

    async def _write_in_thread(self, mine: RestRequest, reply: Reply, size_bytes: int) -> None:
        try:
            body, header_length = await run_in_thread_if_large(size_bytes, self._encoder.encode, mine.options, reply)
        except Failure as failure:
            self.fail(mine, failure)
        except Exception as error:
            mine.done_with(error_reply(internal_failure("a reply could not be written", error)))
        else:
            self._send(mine, _headers(header_length), body)
        finally:
            self._reply_budget.release(size_bytes)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def fail(self, request: Request, failure: Failure) -> None:
        cast("RestRequest", request).done_with(error_reply(failure))

    def _send(self, request: RestRequest, headers: ReplyHeaders, body: bytes) -> None:
        added = b"" if request.timing is None else _timing_line(request.timing, request.arrival)
        if request.form:
            added += b"%b: %b\r\n" % (FORM_HEADER, served_by(request))
        if request.load_format is not None:
            added += _load_line(request.lane, request.load_format)
        reply: HttpReply = _new(HttpReply, (200, headers, body, added))
        try:
            if request.accept_encoding is not None and len(body) >= COMPRESS_BYTES_MIN:
                self._compress(request.accept_encoding, reply, request.done_with)
            else:
                request.done_with(reply)
        except Exception:
            log.exception("a reply could not be delivered")

    def _compress(self, accept_encoding: bytes, reply: HttpReply, done: Done) -> None:
        encoding = choose_encoding(accept_encoding)
        if encoding is None:
            done(reply)
        elif len(reply.body) <= COMPRESS_INLINE_BYTES_MAX:
            done(_compressed(reply, encoding))
        else:
            self._spawn(self._compress_in_thread(reply, encoding, done))

    async def _compress_in_thread(self, reply: HttpReply, encoding: bytes, done: Done) -> None:
        size_bytes = len(reply.body)
        if not self._reply_budget.has_room(size_bytes):
            done(error_reply(self._reply_budget.refusal()))
            return
        self._reply_budget.take(size_bytes)
        try:
            compressed = await asyncio.to_thread(_compressed, reply, encoding)
        except Exception as error:
            compressed = error_reply(internal_failure("a reply could not be compressed", error))
        finally:
            self._reply_budget.release(size_bytes)
        done(compressed)


def _timing_line(timing: BatchTiming, arrival: float) -> bytes:
    return b"server-timing: %b\r\n" % server_timing(timing, arrival) if timing.shown else b""


def _load_line(lane: RequestLane, asked: bytes) -> bytes:
    wanted = wanted_format(asked)
    return b"" if wanted is None else b"%b: %b\r\n" % (HEADER, load_report(lane.load, wanted))


@lru_cache(maxsize=256)
def _headers(header_length: int | None) -> ReplyHeaders:
    if header_length is None:
        return JSON_HEADERS
    return reply_headers((b"content-type", OCTETS), (b"inference-header-content-length", b"%d" % header_length))


def _compressed(reply: HttpReply, encoding: bytes) -> HttpReply:
    headers = reply_headers(*reply.headers.pairs, (b"content-encoding", encoding))
    return HttpReply(reply.status, headers, compress(reply.body, encoding), reply.added)
