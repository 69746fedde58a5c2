"""The record of methods that a plug-in adds to the gRPC port, its contribution `grpc`; and reflection, which tells
clients such as grpcurl and Postman which services there are, with their messages.

Source: gRPC, "Server Reflection Protocol"; v1 and v1alpha differ only in the name of their package.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import ServiceDescriptor
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio

from millstream.gateway.connection.drain import Drain
from millstream.gateway.grpc.codec import parse_cost
from millstream.gateway.grpc.codec.messages import Messages, parse
from millstream.gateway.http.deps import Deps
from millstream.services.access.scopes import Row
from millstream.services.errors import Failure


class Method(NamedTuple):
    """A unary method.

    Args:
        call: (what `make` returned, request message, context) -> reply message. Raises Failure.
        access: what a call needs.
        fields: the fields of its request that are messages, as in parse_cost.within; None: its requests have few
            fields, and larger ones are refused.
    """

    call: Callable[[Any, Any, Any], Awaitable[Any]]
    access: Row
    fields: parse_cost.Fields | None = None


@dataclass(frozen=True, slots=True)
class GrpcService:
    """Methods of a service. Several plug-ins may add to one service.

    Args:
        descriptor: the service; reflection shows its file.
        make: returns the object whose functions `call` names, once in each gateway.
        methods: by name.
    """

    descriptor: ServiceDescriptor
    make: Callable[[Deps, Drain], Any]
    methods: Mapping[str, Method]

    def rows(self) -> dict[str, Row]:
        """Return what the methods need, by their full names."""
        return {f"/{self.descriptor.full_name}/{name}": method.access for name, method in self.methods.items()}


#: the service, in both versions of the protocol
SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
#: a stream without a request for this time ends: it would keep a draining gateway waiting
IDLE_S = 5.0


class Reflection:
    """Answers what clients ask about the services of this port.

    Args:
        messages: reads requests and sends replies.
        services: what this port serves beside reflection.
    """

    def __init__(self, messages: Messages, services: Iterable[GrpcService]) -> None:
        self._messages = messages
        self._servicer = aio.ReflectionServicer(*described(services))

    async def info(self, _: Any, context: Any) -> None:
        """Handle a ServerReflectionInfo call."""
        messages = self._messages
        messages.call(context)
        try:
            async for response in self._servicer.ServerReflectionInfo(self._requests(context), context):
                await context.write(response.SerializeToString())
        except Failure as failure:
            await messages.refuse(context, failure)
        messages.ending(context)

    async def _requests(self, context: Any) -> AsyncIterator[Any]:
        while (body := await self._next(context)) is not None:
            yield parse(reflection_pb2.ServerReflectionRequest, await self._messages.plain(body))

    async def _next(self, context: Any) -> bytes | None:
        """Return the next message; None if the stream has ended, or no message came in time."""
        try:
            async with asyncio.timeout(IDLE_S):
                return await self._messages.next(context)
        except TimeoutError:
            return None


def described(services: Iterable[GrpcService]) -> tuple[list[str], descriptor_pool.DescriptorPool]:
    """Return the names of these services and reflection's, and a pool with their files alone.

    The default pool has those of all libraries, too.
    """
    files = [*dict.fromkeys(service.descriptor.file for service in services), reflection_pb2.DESCRIPTOR]
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()

    def add(file: Any) -> None:
        if file.name not in added:
            added.add(file.name)
            for needed in file.dependencies:
                add(needed)
            pool.AddSerializedFile(file.serialized_pb)

    for file in files:
        add(file)
    return [service.full_name for file in files for service in file.services_by_name.values()], pool
