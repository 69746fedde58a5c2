"""Tells clients such as grpcurl and Postman which services there are, with their messages.

Source: gRPC, "Server Reflection Protocol"; v1 and v1alpha differ only in the name of their package.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

from google.protobuf import descriptor_pool
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection import aio

from millstream.gateway.grpc.codec.messages import Messages, parse
from millstream.gateway.grpc.methods.service import GrpcService
from millstream.services.errors import Failure

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
