"""/v2/systemsharedmemory, /v2/cudasharedmemory: memory that clients registered for their tensors.

Registered memory is read and written with the server's own rights, so these calls are protected as the admin API.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field

from millstream.gateway.http.body import read_document
from millstream.gateway.http.deps import DepsOf
from millstream.gateway.http.errors import documented
from millstream.gateway.http.openapi import json_body
from millstream.plugins.compat.triton.gateway import Triton
from millstream.plugins.compat.triton.shared_memory import Region
from millstream.plugins.compat.triton.shared_settings import when_unlocked
from millstream.services.errors import invalid, not_found
from millstream.services.model.datatypes import ELEMENTS_MAX

router = APIRouter(prefix="/v2")

# 404: a name with a line feed matches no path.
_DONE: dict[int | str, dict[str, Any]] = {200: {"description": "Done; the body is empty."}}
_SYSTEM = "/systemsharedmemory"
_CUDA = "/cudasharedmemory"


class SystemRegion(BaseModel):
    """A region of system shared memory. `key` is its name for shm_open."""

    name: str
    key: str
    offset: int
    byte_size: int


class CudaRegion(BaseModel):
    """A region of GPU memory."""

    name: str
    device_id: int
    byte_size: int


class SystemRegistration(BaseModel):
    """A registration. `offset` and `byte_size` are the part of the memory object that may be used."""

    key: str
    offset: int = Field(0, ge=0, le=ELEMENTS_MAX)
    byte_size: int = Field(ge=1, le=ELEMENTS_MAX)


@router.get(f"{_SYSTEM}/status", summary="Registered regions of system shared memory", responses=documented(501))
async def system_shared_memory_status(deps: DepsOf) -> list[SystemRegion]:
    return [_system_region(region) for region in deps.part(Triton).memory.regions(None)]


@router.get(f"{_SYSTEM}/region/{{region:path}}/status", summary="One registered region", responses=documented(404, 501))
async def system_shared_memory_region_status(region: str, deps: DepsOf) -> list[SystemRegion]:
    return [_system_region(entry) for entry in deps.part(Triton).memory.regions(region)]


@router.post(
    f"{_SYSTEM}/region/{{region:path}}/register",
    summary="Register system shared memory",
    response_class=Response,
    responses=_DONE | documented(400, 404, 409, 413, 429, 501, 503, 507),
    openapi_extra=json_body(SystemRegistration, example={"key": "/my_region", "offset": 0, "byte_size": 1024}),
)
async def system_shared_memory_register(region: str, request: Request, deps: DepsOf) -> Response:
    registration = await read_document(request, SystemRegistration)
    key, offset, size_bytes = registration.key, registration.offset, registration.byte_size
    await when_unlocked(lambda: deps.part(Triton).memory.register(region, key, offset, size_bytes))
    return Response()


@router.post(
    f"{_SYSTEM}/region/{{region:path}}/unregister",
    summary="Unregister a region",
    response_class=Response,
    responses=_DONE | documented(404, 501, 503, 507),
)
async def system_shared_memory_region_unregister(region: str, deps: DepsOf) -> Response:
    await when_unlocked(lambda: deps.part(Triton).memory.unregister(region))
    return Response()


@router.post(
    f"{_SYSTEM}/unregister",
    summary="Unregister all regions",
    response_class=Response,
    responses=_DONE | documented(501, 503, 507),
)
async def system_shared_memory_unregister(deps: DepsOf) -> Response:
    await when_unlocked(lambda: deps.part(Triton).memory.unregister(None))
    return Response()


@router.get(f"{_CUDA}/status", summary="Registered regions of GPU memory: none")
async def cuda_shared_memory_status() -> list[CudaRegion]:
    return []


@router.get(f"{_CUDA}/region/{{region:path}}/status", summary="One registered region", responses=documented(404))
async def cuda_shared_memory_region_status(region: str) -> list[CudaRegion]:
    raise not_found(f"Unable to find cuda shared memory region: '{region}'")


@router.post(
    f"{_CUDA}/region/{{region:path}}/register",
    summary="Register GPU memory: not supported",
    status_code=400,
    response_class=Response,
    responses=documented(400, 404),
)
async def cuda_shared_memory_register(region: str) -> Response:
    raise invalid(f"failed to register CUDA shared memory region: '{region}', GPUs not supported")


@router.post(
    f"{_CUDA}/region/{{region:path}}/unregister",
    summary="Unregister a region of GPU memory",
    response_class=Response,
    responses=_DONE | documented(404),
)
async def cuda_shared_memory_region_unregister(region: str) -> Response:  # noqa: ARG001 - an unknown name is not an error
    return Response()


@router.post(
    f"{_CUDA}/unregister",
    summary="Unregister all regions of GPU memory",
    response_class=Response,
    responses=_DONE,
)
async def cuda_shared_memory_unregister() -> Response:
    return Response()


def _system_region(region: Region) -> SystemRegion:
    return SystemRegion(name=region.name, key=region.key, offset=region.offset, byte_size=region.size_bytes)
