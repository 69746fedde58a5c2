"""shared_memory: registers shared memory of clients. GPU memory is not supported: its calls answer as without a GPU."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.catalog.shared_settings import when_unlocked
from millstream.gateway.protocols.grpc.access import auth
from millstream.gateway.tensors.json_document import excerpt
from millstream.gateway.triton.interfaces import MemoryRegistry
from millstream.services.errors import invalid, not_found
from millstream.services.settings import Settings


class SharedMemoryCalls:
    """Handles unary calls: each method takes a request message and returns the reply message, or raises Failure."""

    def __init__(self, settings: Settings, memory: MemoryRegistry) -> None:
        self._settings = settings
        self._memory = memory

    async def _regions_for(self, context: Any) -> MemoryRegistry:
        await auth.check(self._settings, context)
        return self._memory

    async def system_status(self, request: Any, context: Any) -> Any:
        memory = await self._regions_for(context)
        response = pb.SystemSharedMemoryStatusResponse()
        for region in memory.regions(request.name or None):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.size_bytes
        return response

    async def system_register(self, request: Any, context: Any) -> Any:
        memory = await self._regions_for(context)
        await when_unlocked(lambda: memory.register(request.name, request.key, request.offset, request.byte_size))
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_unregister(self, request: Any, context: Any) -> Any:
        memory = await self._regions_for(context)
        await when_unlocked(lambda: memory.unregister(request.name or None))
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_status(self, request: Any, context: Any) -> Any:
        await auth.check(self._settings, context)
        if request.name:
            raise not_found(f"Unable to find cuda shared memory region: '{excerpt(request.name)}'")
        return pb.CudaSharedMemoryStatusResponse()

    async def cuda_register(self, request: Any, context: Any) -> Any:
        await auth.check(self._settings, context)
        raise invalid(f"failed to register CUDA shared memory region: '{excerpt(request.name)}', GPUs not supported")

    async def cuda_unregister(self, _: Any, context: Any) -> Any:
        await auth.check(self._settings, context)
        return pb.CudaSharedMemoryUnregisterResponse()
