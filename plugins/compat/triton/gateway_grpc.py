"""Triton's extensions over gRPC, beside v2's own methods of the same service.

GPU memory is not supported: its calls answer as those of a server without a GPU.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.grpc.methods.infer import check_version
from millstream.gateway.grpc.methods.service import GrpcService, Method
from millstream.gateway.http.deps import Deps
from millstream.gateway.tensors.json_document import excerpt
from millstream.plugins.compat.triton.gateway import Triton
from millstream.plugins.compat.triton.loader import RepositoryLoader
from millstream.plugins.compat.triton.shared_settings import when_unlocked
from millstream.services.access.scopes import LIST, Need, Row
from millstream.services.errors import Code, Failure, invalid, not_found


class TritonCalls:
    """Handles unary calls: each method takes a request message and returns the reply message, or raises Failure."""

    def __init__(self, deps: Deps) -> None:
        self._triton = deps.part(Triton)

    async def model_config(self, request: Any, _: Any) -> Any:
        check_version(request.version)
        document = self._triton.config_of(request.name, request.version or None)
        response = pb.ModelConfigResponse()
        json_format.ParseDict(document, response.config, ignore_unknown_fields=True)
        return response

    async def model_statistics(self, request: Any, _: Any) -> Any:
        check_version(request.version)
        statistics = await self._triton.statistics.of(request.name or None, request.version or None)
        return pb.ModelStatisticsResponse(**statistics)

    def _loader_for(self, request: Any) -> RepositoryLoader:
        if request.repository_name:
            raise Failure(Code.UNSUPPORTED, "'repository_name' specification is not supported")
        return self._triton.loader

    async def repository_index(self, request: Any, _: Any) -> Any:
        entries = self._loader_for(request).index(ready=request.ready)
        response = pb.RepositoryIndexResponse()
        for entry in entries:
            response.models.add(name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
        return response

    async def repository_load(self, request: Any, _: Any) -> Any:
        control = self._loader_for(request)
        config: str | None = None
        files: dict[str, bytes] = {}
        for name, parameter in request.parameters.items():
            if name == "config":
                config = _field(name, parameter, "string_param")
            elif name.startswith("file:"):
                files[name.removeprefix("file:")] = _field(name, parameter, "bytes_param")
            else:
                raise invalid(f"unrecognized load parameter '{excerpt(name)}': send 'config' or 'file:PATH'")
        if files and config is None:
            raise invalid("files are accepted only together with the parameter 'config'")
        try:
            await control.load(request.model_name, config, files)
        except Failure as failure:
            if failure.code in {Code.NOT_FOUND, Code.INVALID, Code.MODEL}:
                # The reference answers every failed load with INTERNAL; its clients distinguish reasons by the text.
                raise Failure(Code.MODEL, failure.message) from failure
            raise
        return pb.RepositoryModelLoadResponse()

    async def repository_unload(self, request: Any, _: Any) -> Any:
        control = self._loader_for(request)
        for name, parameter in request.parameters.items():
            if name != "unload_dependents":
                raise invalid(f"unrecognized unload parameter '{excerpt(name)}': send 'unload_dependents'")
            _field(name, parameter, "bool_param")
        steps = request.parameters["unload_dependents"].bool_param if request.parameters else False
        await control.unload(request.model_name, steps=steps)
        return pb.RepositoryModelUnloadResponse()

    async def system_status(self, request: Any, _: Any) -> Any:
        response = pb.SystemSharedMemoryStatusResponse()
        for region in self._triton.memory.regions(request.name or None):
            status = response.regions[region.name]
            status.name, status.key = region.name, region.key
            status.offset, status.byte_size = region.offset, region.size_bytes
        return response

    async def system_register(self, request: Any, _: Any) -> Any:
        await when_unlocked(
            lambda: self._triton.memory.register(request.name, request.key, request.offset, request.byte_size)
        )
        return pb.SystemSharedMemoryRegisterResponse()

    async def system_unregister(self, request: Any, _: Any) -> Any:
        await when_unlocked(lambda: self._triton.memory.unregister(request.name or None))
        return pb.SystemSharedMemoryUnregisterResponse()

    async def cuda_status(self, request: Any, _: Any) -> Any:
        if request.name:
            raise not_found(f"Unable to find cuda shared memory region: '{excerpt(request.name)}'")
        return pb.CudaSharedMemoryStatusResponse()

    async def cuda_register(self, request: Any, _: Any) -> Any:
        raise invalid(f"failed to register CUDA shared memory region: '{excerpt(request.name)}', GPUs not supported")

    async def cuda_unregister(self, _: Any, __: Any) -> Any:
        return pb.CudaSharedMemoryUnregisterResponse()

    async def trace_setting(self, request: Any, _: Any) -> Any:
        model = request.model_name or None
        if request.settings:
            changes = {name: _trace_value(value) for name, value in request.settings.items()}
            values = await when_unlocked(lambda: self._triton.traces.update(model, changes))
        else:
            values = self._triton.traces.get(model)
        response = pb.TraceSettingResponse()
        for name, value in values.items():
            response.settings[name].value.extend([value] if isinstance(value, str) else value)
        return response

    async def log_settings(self, request: Any, _: Any) -> Any:
        if request.settings:
            changes = {name: _log_value(name, value) for name, value in request.settings.items()}
            values = await when_unlocked(lambda: self._triton.logs.update(changes))
        else:
            values = self._triton.logs.get()
        response = pb.LogSettingsResponse()
        for name, value in values.items():
            setattr(response.settings[name], _log_field(value), value)
        return response


def _field(name: str, parameter: Any, field: str) -> Any:
    if parameter.WhichOneof("parameter_choice") != field:
        raise invalid(f"invalid value type for '{excerpt(name)}' parameter, expected {field}.")
    return getattr(parameter, field)


def _trace_value(value: Any) -> str | list[str] | None:
    """Return the value of a setting: a single value without a list; None, which clears the setting, for no value."""
    values = list(value.value)
    return values if len(values) > 1 else values[0] if values else None


def _log_value(name: str, value: Any) -> str | int | bool:
    field = value.WhichOneof("parameter_choice")
    if field is None:
        raise invalid(f"the log setting '{excerpt(name)}' has no value")
    setting: str | int | bool = getattr(value, field)
    return setting


def _log_field(value: str | int | bool) -> str:
    if isinstance(value, bool):
        return "bool_param"
    return "uint32_param" if isinstance(value, int) else "string_param"


def _of_settings(message: Any) -> Need:
    """Return the need of TraceSetting and LogSettings, which read if they name no setting."""
    if getattr(message, "model_name", ""):
        return Need.WRITE if message.settings else Need.DESCRIBE
    return Need.ADMIN if message.settings else Need.DESCRIBE


_DESCRIBE, _WRITE = Row(Need.DESCRIBE, "name"), Row(Need.WRITE, "model_name", changes=True)
_MEMORY, _REGISTER = Row(Need.MEMORY), Row(Need.MEMORY, changes=True)
_TRACE = Row(Need.DESCRIBE, "model_name", changes=True, of_message=_of_settings)

EXTENSIONS = GrpcService(
    pb.DESCRIPTOR.services_by_name["GRPCInferenceService"],
    lambda deps, _: TritonCalls(deps),
    {
        "ModelConfig": Method(TritonCalls.model_config, _DESCRIBE),
        "ModelStatistics": Method(TritonCalls.model_statistics, _DESCRIBE),
        "RepositoryIndex": Method(TritonCalls.repository_index, LIST),
        "RepositoryModelLoad": Method(TritonCalls.repository_load, _WRITE),
        "RepositoryModelUnload": Method(TritonCalls.repository_unload, _WRITE),
        "SystemSharedMemoryStatus": Method(TritonCalls.system_status, _MEMORY),
        "SystemSharedMemoryRegister": Method(TritonCalls.system_register, _REGISTER),
        "SystemSharedMemoryUnregister": Method(TritonCalls.system_unregister, _REGISTER),
        "CudaSharedMemoryStatus": Method(TritonCalls.cuda_status, _MEMORY),
        "CudaSharedMemoryRegister": Method(TritonCalls.cuda_register, _REGISTER),
        "CudaSharedMemoryUnregister": Method(TritonCalls.cuda_unregister, _REGISTER),
        "TraceSetting": Method(TritonCalls.trace_setting, _TRACE),
        "LogSettings": Method(TritonCalls.log_settings, _TRACE._replace(model=None)),
    },
)
