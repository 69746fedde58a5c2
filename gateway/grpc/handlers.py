"""handlers: maps the methods of the gRPC services to their handlers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.access.gate import Gate
from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.error_reply import internal_failure
from millstream.gateway.grpc.access.guard import Guard, check_message
from millstream.gateway.grpc.call_counts import CallCounts
from millstream.gateway.grpc.codec import parse_cost
from millstream.gateway.grpc.codec.messages import Messages, parse, parse_counted, set_compression
from millstream.gateway.grpc.connections.observed_calls import ObservedCalls
from millstream.gateway.grpc.methods.health import Health
from millstream.gateway.grpc.methods.infer import InferCalls
from millstream.gateway.grpc.methods.metadata import MetadataCalls
from millstream.gateway.grpc.methods.reflection import SERVICES, Reflection
from millstream.gateway.grpc.methods.stream import Stream
from millstream.gateway.http.deps import Deps
from millstream.plugins.compat.tfserving.grpc import schema
from millstream.plugins.compat.tfserving.grpc.calls import ModelCalls, PredictionCalls
from millstream.plugins.compat.triton.gateway_grpc import TritonCalls
from millstream.services.access.table import GRPC
from millstream.services.errors import Failure
from millstream.services.metrics.catalogue import RequestProtocol

_Call = Callable[[Any, Any], Awaitable[Any]]
_Handler = Callable[[Any, Any], Awaitable[bytes]]
_Read = Callable[[bytes], Awaitable[Any]]  # parses a message


class MethodTable:
    """Finds the handler of a method. Handlers take and return bytes.

    All methods are registered as stream methods, so that the handler decides when to read. On the wire a unary call is
    a stream of one message. `calls` counts all calls.
    `infer` and `count_infer` are for FastInfer, which answers ModelInfer without its handler.

    Args:
        deps: the parts of the gateway.
        drain: tells whether the gateway is draining.
        messages: reads requests and sends replies.
    """

    def __init__(self, deps: Deps, drain: Drain, messages: Messages) -> None:
        self.calls = 0
        self._counts = CallCounts(deps.registry)
        self.count_infer = self._counts.counter("ModelInfer")
        self.infer = infer = InferCalls(deps.caller(RequestProtocol.GRPC), messages, deps.texts)
        observed = None if deps.observer is None else ObservedCalls(deps.observer)
        stream = Stream(infer, messages, lambda: drain.draining, deps.gate, observed)
        self._guard = guard = Guard(deps.gate, messages, deps.audit, deps.count_refusal)
        handlers = {name: _inference(name, call, messages, deps.gate) for name, call in _calls(deps, drain).items()}
        handlers["ModelInfer"] = grpc.stream_unary_rpc_method_handler(infer.model_infer)
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(stream.model_stream_infer)
        services = {
            "inference.GRPCInferenceService": handlers,
            "grpc.health.v1.Health": _health(deps, drain, messages),
            **_tfserving(deps, messages),
        }
        if deps.settings.grpc_reflection:
            info = grpc.stream_stream_rpc_method_handler(Reflection(messages).info)
            services |= {service: {"ServerReflectionInfo": info} for service in SERVICES}
        observe = _unobserved if observed is None else observed.observed
        self._handlers = {
            f"/{service}/{name}": self._counts.counted(
                name,
                observe(service, name, guard.guarded(f"/{service}/{name}", handler)),
            )
            for service, methods in services.items()
            for name, handler in methods.items()
        }

    @property
    def methods(self) -> frozenset[str]:
        """The full names of all methods."""
        return frozenset(self._handlers)

    async def close(self) -> None:
        """Write what the audit log still has to say about calls. Call it when all have ended."""
        await self._guard.close()

    def find(self, method: str) -> Any:
        """Return the handler of a call, and count the call; None: no service has the method."""
        self.calls += 1
        handler = self._handlers.get(method)
        if handler is None:
            self._counts.unknown_method()
        return handler


def _unobserved(_service: str, _name: str, handler: Any) -> Any:
    return handler


def _calls(deps: Deps, drain: Drain) -> dict[str, _Call]:
    metadata = MetadataCalls(deps, drain)
    extensions = TritonCalls(deps)
    return {
        "ServerLive": metadata.server_live,
        "ServerReady": metadata.server_ready,
        "ServerMetadata": metadata.server_metadata,
        "ModelReady": metadata.model_ready,
        "ModelMetadata": metadata.model_metadata,
        "ModelConfig": extensions.model_config,
        "ModelStatistics": extensions.model_statistics,
        "RepositoryIndex": extensions.repository_index,
        "RepositoryModelLoad": extensions.repository_load,
        "RepositoryModelUnload": extensions.repository_unload,
        "SystemSharedMemoryStatus": extensions.system_status,
        "SystemSharedMemoryRegister": extensions.system_register,
        "SystemSharedMemoryUnregister": extensions.system_unregister,
        "CudaSharedMemoryStatus": extensions.cuda_status,
        "CudaSharedMemoryRegister": extensions.cuda_register,
        "CudaSharedMemoryUnregister": extensions.cuda_unregister,
        "TraceSetting": extensions.trace_setting,
        "LogSettings": extensions.log_settings,
    }


def _health(deps: Deps, drain: Drain, messages: Messages) -> dict[str, Any]:
    health = Health(lambda: deps.ready() and not drain.draining, lambda: drain.draining)

    async def watch(_: Any, context: Any) -> None:
        messages.call(context)
        try:
            request = parse(health_pb2.HealthCheckRequest, await messages.plain(await messages.read(context)))
        except Failure as failure:
            await messages.refuse(context, failure)
        async for response in health.watch(request, context):
            await context.write(response.SerializeToString())
        messages.ending(context)

    check = _handler("HealthCheck", _parser(health_pb2.HealthCheckRequest), health.check, messages)
    return {
        "Check": grpc.stream_unary_rpc_method_handler(check),
        "Watch": grpc.stream_stream_rpc_method_handler(watch),
    }


def _tfserving(deps: Deps, messages: Messages) -> dict[str, dict[str, Any]]:
    prediction, models = PredictionCalls(deps), ModelCalls(deps)
    calls: dict[str, dict[str, tuple[_Call, parse_cost.Fields]]] = {
        schema.PREDICTION_SERVICE: {
            "Predict": (prediction.predict, parse_cost.PREDICT),
            "Classify": (prediction.classify, parse_cost.EXAMPLES),
            "Regress": (prediction.regress, parse_cost.EXAMPLES),
            "MultiInference": (prediction.multi_inference, parse_cost.EXAMPLES),
            "GetModelMetadata": (prediction.get_model_metadata, parse_cost.ANY),
        },
        schema.MODEL_SERVICE: {
            "GetModelStatus": (models.get_model_status, parse_cost.ANY),
            "HandleReloadConfigRequest": (models.handle_reload_config_request, parse_cost.ANY),
        },
    }

    def handler(service: str, name: str, call: _Call, fields: parse_cost.Fields) -> Any:
        read = partial(parse_counted, schema.request_of(service, name), fields=fields)
        return _unary(service, name, read, call, messages, deps.gate)

    return {
        service: {name: handler(service, name, *answered) for name, answered in methods.items()}
        for service, methods in calls.items()
    }


def _inference(name: str, call: _Call, messages: Messages, gate: Gate) -> Any:
    read = _parser(getattr(pb, f"{name}Request"))
    return _unary("inference.GRPCInferenceService", name, read, call, messages, gate)


def _parser(kind: Any) -> _Read:
    async def read(body: bytes) -> Any:
        return parse(kind, body)

    return read


def _unary(service: str, name: str, read: _Read, call: _Call, messages: Messages, gate: Gate) -> Any:
    row = GRPC.get(f"/{service}/{name}")

    async def allowed(request: Any, context: Any) -> Any:
        check_message(gate, row, request, context)
        return await call(request, context)

    return grpc.stream_unary_rpc_method_handler(_handler(name, read, allowed, messages))


def _handler(name: str, read: _Read, call: _Call, messages: Messages) -> _Handler:
    """Return a handler that takes and returns bytes for `call`. It turns a Failure into the status of its code."""

    async def handle(_: Any, context: Any) -> bytes:
        messages.call(context)
        try:
            body = await messages.read(context)
            response = await call(await read(await messages.plain(body)), context)
        except Failure as failure:
            await messages.refuse(context, failure)
        except (asyncio.CancelledError, grpc.aio.AbortError):
            raise
        except Exception as error:
            await messages.refuse(context, internal_failure(f"a {name} call", error))
        encoded: bytes = response.SerializeToString()
        set_compression(body, context, len(encoded))
        messages.ending(context)
        return encoded

    return handle
