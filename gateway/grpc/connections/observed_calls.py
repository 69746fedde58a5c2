"""Passes finished gRPC calls to the observer. A gateway without observer has plain handlers.

Of a stream each inference request is observed, not the stream itself: its end may be days away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import unquote

import grpc

from millstream.gateway.access.principal import caller_name
from millstream.gateway.observing.finished import FAILED_GRPC, TICKETS, Finished
from millstream.gateway.observing.observer import Observer
from millstream.services.errors import GRPC_STATUS, Failure
from millstream.services.process.request_id import REQUEST_ID, TRACE
from millstream.services.traceparent import usable_traceparent

_NUMBERS = {code: code.value[0] for code in grpc.StatusCode} | {
    code.value[0]: code.value[0] for code in grpc.StatusCode
}
_UNKNOWN, _CANCELLED = grpc.StatusCode.UNKNOWN.value[0], grpc.StatusCode.CANCELLED.value[0]


class ObservedCalls:
    """Observes the calls of a server."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer

    def observed(self, service: str, method: str, handler: Any) -> Any:
        """Return `handler`, one of grpc's; if it is of a unary call, its calls are observed."""
        if handler.stream_unary is None:
            return handler
        handle = handler.stream_unary

        async def call(requests: Any, context: Any) -> Any:
            with self.call(service, method, context) as reply_bytes:
                reply = await handle(requests, context)
                reply_bytes.append(len(reply))
                return reply

        return handler._replace(stream_unary=call)

    @contextmanager
    def call(self, service: str, method: str, context: Any) -> Iterator[list[int]]:
        """Observe a call, or a request of a stream, while the block runs. It appends the bytes of the reply."""
        started = time.monotonic()
        trace = self._observer.trace(_sent(context))
        TRACE.set(trace)
        tickets: list[Any] = []
        TICKETS.set(tickets)
        reply_bytes: list[int] = []
        status = 0
        try:
            yield reply_bytes
        except BaseException as error:
            status = _status(error, context)
            raise
        finally:
            ended = time.monotonic()
            takers = self._observer.takers(trace, started, ended, failed=status in FAILED_GRPC)
            if takers:
                finished = Finished(
                    "grpc",
                    method,
                    service,
                    f"/{service}/{method}",
                    status,
                    started,
                    ended,
                    REQUEST_ID.get(),
                    trace,
                    address_of(context.peer()),
                    sum(reply_bytes),
                    caller_name(),
                )
                self._observer.finish(takers, finished, tickets)


def _sent(context: Any) -> bytes | None:
    sent = None
    for key, value in context.invocation_metadata() or ():
        if key == "traceparent" and isinstance(value, str):
            sent = usable_traceparent(value.encode())
    return sent


def address_of(peer: str) -> str:
    """Return the address in the library's name of a peer: `ipv4:127.0.0.1:5`, `ipv6:%5B::1%5D:5` or `unix:`."""
    kind, _, address = unquote(peer).partition(":")
    return address.rpartition(":")[0].strip("[]") if kind in {"ipv4", "ipv6"} else kind


def _status(error: BaseException, context: Any) -> int:
    if isinstance(error, Failure):
        return int(_NUMBERS[grpc.StatusCode[GRPC_STATUS[error.code]]])
    if isinstance(error, grpc.aio.AbortError):
        return int(_NUMBERS.get(context.code(), _UNKNOWN))
    return int(_CANCELLED if isinstance(error, asyncio.CancelledError | GeneratorExit) else _UNKNOWN)
