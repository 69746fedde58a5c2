"""Which call of which service goes where."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from gateway.deps import Deps
from gateway.drain import Drain
from gateway.grpc.describe import Describe
from gateway.grpc.health import Health
from gateway.grpc.infer import Infer
from gateway.grpc.instruments import Instruments
from gateway.grpc.memory import Memory
from gateway.grpc.messages import PACKED, answer_alike, parse, unpack
from gateway.grpc.repository import Repository
from gateway.grpc.statistics import About
from gateway.grpc.status import refuse
from gateway.grpc.stream import Stream
from gateway.refusals import unexpected
from services.errors import Failure

_Call = Callable[[Any, Any], Awaitable[Any]]
_Handler = Callable[[bytes, Any], Awaitable[bytes]]


class Table(grpc.GenericRpcHandler):  # type: ignore[misc]
    """For grpc.aio.Server.add_generic_rpc_handlers. Messages come and go as bytes: each handler reads its own.

    `calls`: how many there have been.
    """

    def __init__(self, deps: Deps, drain: Drain) -> None:
        self.calls = 0
        bytes_max = deps.settings.body_bytes_max
        infer = Infer(deps.caller, bytes_max)
        stream = Stream(infer, bytes_max, lambda: drain.begun)
        handlers = {name: _unary(name, call, bytes_max) for name, call in _calls(deps, drain).items()}
        handlers["ModelInfer"] = grpc.unary_unary_rpc_method_handler(infer.model_infer)
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(stream.model_stream_infer)
        self._handlers = {f"/inference.GRPCInferenceService/{name}": handler for name, handler in handlers.items()}
        for name, handler in _health(deps, drain, bytes_max).items():
            self._handlers[f"/grpc.health.v1.Health/{name}"] = handler

    def service(self, handler_call_details: Any) -> Any:
        """Called by the library for each call."""
        self.calls += 1
        return self._handlers.get(handler_call_details.method)


def _calls(deps: Deps, drain: Drain) -> dict[str, _Call]:
    describe = Describe(deps, drain)
    about = About(deps.statistics, deps.configurations)
    repository = Repository(deps.settings, deps.control)
    memory = Memory(deps.settings, deps.client_memory)
    instruments = Instruments(deps.settings, deps.traces, deps.logs)
    return {
        "ServerLive": describe.server_live,
        "ServerReady": describe.server_ready,
        "ServerMetadata": describe.server_metadata,
        "ModelReady": describe.model_ready,
        "ModelMetadata": describe.model_metadata,
        "ModelConfig": about.model_config,
        "ModelStatistics": about.model_statistics,
        "RepositoryIndex": repository.index,
        "RepositoryModelLoad": repository.load,
        "RepositoryModelUnload": repository.unload,
        "SystemSharedMemoryStatus": memory.system_status,
        "SystemSharedMemoryRegister": memory.system_register,
        "SystemSharedMemoryUnregister": memory.system_unregister,
        "CudaSharedMemoryStatus": memory.cuda_status,
        "CudaSharedMemoryRegister": memory.cuda_register,
        "CudaSharedMemoryUnregister": memory.cuda_unregister,
        "TraceSetting": instruments.trace_setting,
        "LogSettings": instruments.log_settings,
    }


def _health(deps: Deps, drain: Drain, bytes_max: int) -> dict[str, Any]:
    health = Health(lambda: deps.ready() and not drain.begun, lambda: drain.begun)

    async def watch(body: bytes, context: Any) -> AsyncIterator[bytes]:
        try:
            request = parse(health_pb2.HealthCheckRequest, await _plain(body, bytes_max))
        except Failure as failure:
            await refuse(context, failure)
        async for response in health.watch(request, context):
            yield response.SerializeToString()

    check = _handler("HealthCheck", health_pb2.HealthCheckRequest, health.check, bytes_max)
    return {
        "Check": grpc.unary_unary_rpc_method_handler(check),
        "Watch": grpc.unary_stream_rpc_method_handler(watch),
    }


def _unary(name: str, call: _Call, bytes_max: int) -> Any:
    return grpc.unary_unary_rpc_method_handler(_handler(name, getattr(pb, f"{name}Request"), call, bytes_max))


def _handler(name: str, kind: Any, call: _Call, bytes_max: int) -> _Handler:
    """`call` as a handler of bytes; what goes wrong becomes the status of its code."""

    async def handle(body: bytes, context: Any) -> bytes:
        try:
            response = await call(parse(kind, await _plain(body, bytes_max)), context)
        except Failure as failure:
            await refuse(context, failure)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await refuse(context, unexpected(f"a {name} call", error))
        written: bytes = response.SerializeToString()
        await answer_alike(body, context, len(written))
        return written

    return handle


async def _plain(body: bytes, bytes_max: int) -> bytes:
    return await unpack(body, bytes_max) if body and body[0] in PACKED else body
