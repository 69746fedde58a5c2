"""shared_memory: registers shared memory of clients. GPU memory is not supported: its calls answer as without a GPU."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.catalog.shared_settings import when_unlocked
from millstream.gateway.tensors.json_document import excerpt
from millstream.plugins.compat.triton.interfaces import MemoryRegistry
from millstream.services.errors import invalid, not_found


class SharedMemoryCalls:
    """Handles unary calls: each method takes a request message and returns the reply message, or raises Failure."""

    def __init__(self, memory: MemoryRegistry) -> None:
        self._memory = memory

    async def system_status(self, request: Any, _: Any) -> Any:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._memory.regions(request.name or None):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.size_bytes
        return response

    async def system_register(self, request: Any, _: Any) -> Any:
        await when_unlocked(lambda: self._memory.register(request.name, request.key, request.offset, request.byte_size))
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_unregister(self, request: Any, _: Any) -> Any:
        await when_unlocked(lambda: self._memory.unregister(request.name or None))
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_status(self, request: Any, _: Any) -> Any:
        if request.name:
            raise not_found(f"Unable to find cuda shared memory region: '{excerpt(request.name)}'")
        return pb.CudaSharedMemoryStatusResponse()

    async def cuda_register(self, request: Any, _: Any) -> Any:
        raise invalid(f"failed to register CUDA shared memory region: '{excerpt(request.name)}', GPUs not supported")

    async def cuda_unregister(self, _: Any, __: Any) -> Any:
        return pb.CudaSharedMemoryUnregisterResponse()
