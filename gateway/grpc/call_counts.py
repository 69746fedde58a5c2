"""call_counts: counts calls by method and code when their handler ends.

The code is what the server answered: a call that its client cancelled, or whose deadline passed, counts as CANCELLED.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from millstream.services.metrics.catalogue import GRPC_CALLS
from millstream.services.metrics.merge import OTHER
from millstream.services.metrics.registry import MetricsRegistry

_Handle = Callable[[Any, Any], Any]

#: by the number and by the code itself: the library's contexts return either
_CODES = {key: code for code in grpc.StatusCode for key in (code, code.value[0])}


class CallCounts:
    """The counters of one gateway."""

    def __init__(self, registry: MetricsRegistry) -> None:
        self._registry = registry

    def counted(self, method: str, handler: Any) -> Any:
        """Return `handler`, whose calls are counted. It is one of grpc's handlers, with a coroutine."""
        field = "stream_unary" if handler.stream_unary is not None else "stream_stream"
        return handler._replace(**{field: self._coroutine(method, getattr(handler, field))})

    def counter(self, method: str) -> Callable[[grpc.StatusCode], None]:
        """Return a function that counts a call of `method` that ended with a status."""
        ok = self._registry.counter(GRPC_CALLS, method, grpc.StatusCode.OK.name)

        def count(code: grpc.StatusCode) -> None:
            if code is grpc.StatusCode.OK:
                ok.add()
            else:
                self._registry.counter(GRPC_CALLS, method, code.name).add()

        return count

    def unknown_method(self) -> None:
        """Count a call of a method that no service has. The library answers it."""
        self._registry.counter(GRPC_CALLS, OTHER, grpc.StatusCode.UNIMPLEMENTED.name).add()

    def _coroutine(self, method: str, handle: _Handle) -> _Handle:
        ok = self._registry.counter(GRPC_CALLS, method, grpc.StatusCode.OK.name)

        async def call(requests: Any, context: Any) -> Any:
            try:
                reply = await handle(requests, context)
            except BaseException as error:
                self._failed(method, error, context)
                raise
            ok.add()
            return reply

        return call

    def _failed(self, method: str, error: BaseException, context: Any) -> None:
        if isinstance(error, grpc.aio.AbortError):
            code = _CODES.get(context.code(), grpc.StatusCode.UNKNOWN)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            code = grpc.StatusCode.CANCELLED
        else:
            code = grpc.StatusCode.UNKNOWN
        self._registry.counter(GRPC_CALLS, method, code.name).add()
