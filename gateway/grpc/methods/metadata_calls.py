"""Answers calls for liveness, readiness and metadata of the server and of models, and for health.

Source: gRPC Health Checking Protocol.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.catalog.snapshot import ModelView, VersionView, version_number
from millstream.gateway.connection.drain import Drain
from millstream.gateway.grpc.methods.infer import check_version
from millstream.gateway.http.deps import Deps
from millstream.gateway.v2.schemas import extensions, model_metadata, server_metadata
from millstream.services.errors import Code, Failure


class MetadataCalls:
    """Handles unary calls: each method takes a request message and returns the reply message, or raises Failure.

    Args:
        deps: the parts of the gateway.
        drain: tells whether the gateway is draining.
    """

    def __init__(self, deps: Deps, drain: Drain) -> None:
        self._deps = deps
        self._drain = drain

    def ready(self) -> bool:
        """Whether this gateway would answer a request now."""
        return self._deps.ready() and not self._drain.draining

    async def server_live(self, _: Any, __: Any) -> Any:
        return pb.ServerLiveResponse(live=True)

    async def server_ready(self, _: Any, __: Any) -> Any:
        return pb.ServerReadyResponse(ready=self.ready())

    async def server_metadata(self, _: Any, __: Any) -> Any:
        deps = self._deps
        return pb.ServerMetadataResponse(**server_metadata(deps.version, extensions()))

    async def model_ready(self, request: Any, _: Any) -> Any:
        """Answer whether a model is ready. An unknown model is not ready, which is not an error."""
        try:
            version = self._find(request)[1]
        except Failure as failure:
            if failure.code is not Code.NOT_FOUND:
                raise
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=version.available and self._deps.answering(version.manifest.content_id))

    async def model_metadata(self, request: Any, _: Any) -> Any:
        model, version = self._find(request)
        serving = [number for number, view in sorted(model.versions.items()) if view.available]
        return pb.ModelMetadataResponse(**model_metadata(version.manifest, serving))

    def _find(self, request: Any) -> tuple[ModelView, VersionView]:
        check_version(request.version)
        view = self._deps.catalog.snapshot.model(request.name)
        return view, view.version(version_number(request.name, request.version) if request.version else None)


#: names of the server as a whole, and of its service
SERVICES = ("", "inference.GRPCInferenceService")
WATCH_POLL_S = 0.1

_Status = health_pb2.HealthCheckResponse


class HealthCalls:
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
