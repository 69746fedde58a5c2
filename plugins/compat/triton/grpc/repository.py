"""repository: RepositoryIndex, RepositoryModelLoad, RepositoryModelUnload: list, load and unload models."""

from __future__ import annotations

from typing import Any

from tritonclient.grpc import service_pb2 as pb

from millstream.gateway.http.deps import Deps
from millstream.gateway.tensors.json_document import excerpt
from millstream.plugins.compat.triton.gateway import Triton
from millstream.plugins.compat.triton.loader import RepositoryLoader
from millstream.services.errors import Code, Failure, invalid


class RepositoryCalls:
    """Handles unary calls: each method takes a request message and returns the reply message, or raises Failure."""

    def __init__(self, deps: Deps) -> None:
        self._loader = deps.part(Triton).loader

    def _loader_for(self, request: Any) -> RepositoryLoader:
        if request.repository_name:
            raise Failure(Code.UNSUPPORTED, "'repository_name' specification is not supported")
        return self._loader

    async def index(self, request: Any, _: Any) -> Any:
        entries = self._loader_for(request).index(ready=request.ready)
        response = pb.RepositoryIndexResponse()
        for entry in entries:
            response.models.add(name=entry.name, version=entry.version, state=entry.state, reason=entry.reason)
        return response

    async def load(self, request: Any, _: Any) -> Any:
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

    async def unload(self, request: Any, _: Any) -> Any:
        control = self._loader_for(request)
        for name, parameter in request.parameters.items():
            if name != "unload_dependents":
                raise invalid(f"unrecognized unload parameter '{excerpt(name)}': send 'unload_dependents'")
            _field(name, parameter, "bool_param")
        await control.unload(request.model_name)
        return pb.RepositoryModelUnloadResponse()


def _field(name: str, parameter: Any, field: str) -> Any:
    if parameter.WhichOneof("parameter_choice") != field:
        raise invalid(f"invalid value type for '{excerpt(name)}' parameter, expected {field}.")
    return getattr(parameter, field)
