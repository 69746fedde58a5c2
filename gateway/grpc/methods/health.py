"""health: grpc.health.v1.Health for probes and load balancers, SERVING only while this gateway answers requests.

Source: gRPC Health Checking Protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2 as pb

from millstream.gateway.connection.drain import Drain
from millstream.gateway.http.deps import Deps

#: names of the server as a whole, and of its service
SERVICES = ("", "inference.GRPCInferenceService")
WATCH_POLL_S = 0.1

_Status = pb.HealthCheckResponse


class Health:
    """The health service."""

    def __init__(self, deps: Deps, drain: Drain) -> None:
        self._deps = deps
        self._drain = drain

    def _status(self, service: str) -> int:
        if service not in SERVICES:
            return int(_Status.SERVICE_UNKNOWN)
        ready = self._deps.ready() and not self._drain.draining
        return int(_Status.SERVING if ready else _Status.NOT_SERVING)

    async def check(self, request: Any, context: Any) -> Any:
        if request.service not in SERVICES:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service here")
        return _Status(status=self._status(request.service))

    async def watch(self, request: Any, _: Any) -> AsyncIterator[Any]:
        """Yield the status now and after each change. Ends when this gateway drains: the client connects to another."""
        reported = None
        while True:
            draining = self._drain.draining
            status = self._status(request.service)
            if status != reported:
                reported = status
                yield _Status(status=status)
            if draining:
                return
            await asyncio.sleep(WATCH_POLL_S)
