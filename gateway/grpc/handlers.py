"""Maps the methods of the gRPC services to their handlers, and counts their calls by method and code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.access.gate import Gate
from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.error_reply import internal_failure
from millstream.gateway.grpc.codec.messages import Messages, parse, parse_counted, set_compression
from millstream.gateway.grpc.guard import CallGuard, Handle, ObservedCalls, check_message, status_of
from millstream.gateway.grpc.methods.infer import InferCalls
from millstream.gateway.grpc.methods.infer_stream import InferStream
from millstream.gateway.grpc.methods.metadata_calls import HealthCalls, MetadataCalls
from millstream.gateway.grpc.methods.service import SERVICES, GrpcService, Method, Reflection
from millstream.gateway.http.deps import Deps
from millstream.services.access.scopes import LIST, Need, Row
from millstream.services.errors import Code, Failure
from millstream.services.metrics.catalogue import GRPC_CALLS, RequestProtocol
from millstream.services.metrics.record import OTHER
from millstream.services.metrics.registry import MetricsRegistry
from millstream.services.plugin.registry import contributions


class CallCounts:
    """Counts the calls of one gateway when their handlers end, by what the server answered.

    A call that its client cancelled, or whose deadline passed, counts as CANCELLED.
    """

    def __init__(self, registry: MetricsRegistry) -> None:
        self._registry = registry

    def counted(self, method: str, handle: Handle) -> Handle:
        """Return `handle`, whose calls are counted."""
        count = self.counter(method)

        async def call(requests: Any, context: Any) -> Any:
            try:
                reply = await handle(requests, context)
            except BaseException as error:
                count(status_of(error, context))
                raise
            count(grpc.StatusCode.OK)
            return reply

        return call

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


_INFERENCE = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
_OPEN, _DESCRIBE = Row(Need.OPEN), Row(Need.DESCRIBE, "name")
CORE = (
    GrpcService(
        _INFERENCE,
        MetadataCalls,
        {
            "ServerLive": Method(MetadataCalls.server_live, _OPEN),
            "ServerReady": Method(MetadataCalls.server_ready, _OPEN),
            "ServerMetadata": Method(MetadataCalls.server_metadata, _OPEN),
            "ModelReady": Method(MetadataCalls.model_ready, _DESCRIBE),
            "ModelMetadata": Method(MetadataCalls.model_metadata, _DESCRIBE),
        },
    ),
    GrpcService(_HEALTH, HealthCalls, {"Check": Method(HealthCalls.check, _OPEN)}),
)
#: methods that read and write their messages themselves
STREAMS = {
    f"/{_INFERENCE.full_name}/ModelInfer": Row(Need.INFER),
    f"/{_INFERENCE.full_name}/ModelStreamInfer": Row(Need.INFER),
    f"/{_HEALTH.full_name}/Watch": _OPEN,
    **{f"/{service}/ServerReflectionInfo": LIST for service in SERVICES},
}


def services() -> tuple[GrpcService, ...]:
    """Return the services of the core, and what plug-ins that are on add."""
    return (*CORE, *contributions("grpc", GrpcService))


def rows() -> dict[str, Row]:
    """Return what each method needs, by its full name."""
    return {**STREAMS, **{name: row for service in services() for name, row in service.rows().items()}}


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
        self.infer = infer = InferCalls(deps.caller(RequestProtocol.GRPC), messages)
        self._observed = observed = None if deps.observer is None else ObservedCalls(deps.observer)
        stream = InferStream(infer, messages, lambda: drain.draining, deps.gate, observed)
        self._guard = CallGuard(deps.gate, messages, deps.audit, deps.count_refusal)
        found = services()
        reflection = Reflection(messages, found).info
        unary: dict[str, Handle] = {f"/{_INFERENCE.full_name}/ModelInfer": infer.model_infer}
        streams: dict[str, Handle] = {
            f"/{_INFERENCE.full_name}/ModelStreamInfer": stream.model_stream_infer,
            f"/{_HEALTH.full_name}/Watch": _watch(HealthCalls(deps, drain), messages),
            **{f"/{service}/ServerReflectionInfo": reflection for service in SERVICES},
        }
        for service in found:
            made = service.make(deps, drain)
            for name in service.methods:
                full = f"/{service.descriptor.full_name}/{name}"
                if full in unary or full in streams:
                    raise Failure(Code.INTERNAL, f"two plug-ins add the gRPC method {full}")
                unary[full] = _unary(service, name, made, messages, deps.gate)
        needs = rows()
        self._handlers = {}
        for full, handle in unary.items():
            self._handlers[full] = grpc.stream_unary_rpc_method_handler(self._noted(full, needs[full], handle))
        for full, handle in streams.items():
            noted = self._noted(full, needs[full], handle, streams=True)
            self._handlers[full] = grpc.stream_stream_rpc_method_handler(noted)

    def _noted(self, full: str, row: Row, handle: Handle, *, streams: bool = False) -> Handle:
        """Return `handle`, whose calls are checked, observed and counted."""
        service, name = full[1:].split("/")
        checked = self._guard.checked(full, row, handle, counted=not streams)
        if self._observed is not None and not streams:
            checked = self._observed.observed(service, name, checked)
        return self._counts.counted(name, checked)

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


def _watch(health: HealthCalls, messages: Messages) -> Handle:
    async def watch(_: Any, context: Any) -> None:
        messages.call(context)
        try:
            request = parse(health_pb2.HealthCheckRequest, await messages.plain(await messages.read(context)))
        except Failure as failure:
            await messages.refuse(context, failure)
        async for response in health.watch(request, context):
            await context.write(response.SerializeToString())
        messages.ending(context)

    return watch


def _unary(service: GrpcService, name: str, made: Any, messages: Messages, gate: Gate) -> Handle:
    """Return a handler that takes and returns bytes. It turns a Failure into the status of its code."""
    method = service.methods[name]
    kind = GetMessageClass(service.descriptor.methods_by_name[name].input_type)

    async def handle(_: Any, context: Any) -> bytes:
        messages.call(context)
        try:
            body = await messages.read(context)
            plain = await messages.plain(body)
            request = parse(kind, plain) if method.fields is None else await parse_counted(kind, plain, method.fields)
            check_message(gate, method.access, request, context)
            response = await method.call(made, request, context)
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
