"""table: a row of the authorisation table: what an HTTP route or a gRPC method needs. Pure.

The rows of routes are beside them, in their adapters (gateway/http/adapter.py). A route or method without a row is
refused. tests/unit/access/test_access_table.py walks all routes and methods.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from millstream.services.access.scopes import Need


class Row(NamedTuple):
    """What a call needs.

    Args:
        need: the need.
        model: the path parameter, or the field of the gRPC message (`a.b`: b of a), that names the model; None: the
            call names none there. Calls that run a model check its name again when they find it.
        changes: whether the call changes something, so that the audit log has it.
        admin: whether it is one of the admin API, which is never open.
        of_message: returns what a gRPC message needs, where that depends on its fields.
    """

    need: Need
    model: str | None = None
    changes: bool = False
    admin: bool = False
    of_message: Callable[[Any], Need] | None = None

    @property
    def controls(self) -> bool:
        """Whether it changes the server or touches its memory: open without keys only where a setting says so."""
        return self.changes or self.need is Need.MEMORY

    @property
    def keyless(self) -> bool:
        """Whether anybody may make the call while no key exists."""
        return not (self.admin or self.controls)

    def for_message(self, message: Any) -> Row:
        """Return the row of a call whose gRPC message has been read."""
        if self.of_message is None:
            return self
        need = self.of_message(message)
        return self._replace(need=need, changes=need in {Need.WRITE, Need.ADMIN}, of_message=None)


#: what calls of routes need, by method and template of the path
Rows = Mapping[tuple[str, str], Row]
#: of a list of models, which shows those that the caller may describe
LIST = Row(Need.DESCRIBE)


def _of_settings(message: Any) -> Need:
    """Return the need of TraceSetting and LogSettings, which read if they name no setting."""
    if getattr(message, "model_name", ""):
        return Need.WRITE if message.settings else Need.DESCRIBE
    return Need.ADMIN if message.settings else Need.DESCRIBE


_INFERENCE = "/inference.GRPCInferenceService/"
_REFLECTION = ("/grpc.reflection.v1.ServerReflection/", "/grpc.reflection.v1alpha.ServerReflection/")
_GRPC_INFERENCE: dict[str, Row] = {
    "ServerLive": Row(Need.OPEN),
    "ServerReady": Row(Need.OPEN),
    "ServerMetadata": Row(Need.OPEN),
    "ModelInfer": Row(Need.INFER),
    "ModelStreamInfer": Row(Need.INFER),
    "ModelReady": Row(Need.DESCRIBE, "name"),
    "ModelMetadata": Row(Need.DESCRIBE, "name"),
    "ModelConfig": Row(Need.DESCRIBE, "name"),
    "ModelStatistics": Row(Need.DESCRIBE, "name"),
    "RepositoryIndex": LIST,
    "RepositoryModelLoad": Row(Need.WRITE, "model_name", changes=True),
    "RepositoryModelUnload": Row(Need.WRITE, "model_name", changes=True),
    "SystemSharedMemoryStatus": Row(Need.MEMORY),
    "SystemSharedMemoryRegister": Row(Need.MEMORY, changes=True),
    "SystemSharedMemoryUnregister": Row(Need.MEMORY, changes=True),
    "CudaSharedMemoryStatus": Row(Need.MEMORY),
    "CudaSharedMemoryRegister": Row(Need.MEMORY, changes=True),
    "CudaSharedMemoryUnregister": Row(Need.MEMORY, changes=True),
    "TraceSetting": Row(Need.DESCRIBE, "model_name", changes=True, of_message=_of_settings),
    "LogSettings": Row(Need.DESCRIBE, changes=True, of_message=_of_settings),
}
_GRPC_TFSERVING: dict[str, Row] = {
    "PredictionService/Predict": Row(Need.INFER, "model_spec.name"),
    "PredictionService/Classify": Row(Need.INFER, "model_spec.name"),
    "PredictionService/Regress": Row(Need.INFER, "model_spec.name"),
    "PredictionService/MultiInference": Row(Need.INFER),
    "PredictionService/GetModelMetadata": Row(Need.DESCRIBE, "model_spec.name"),
    "ModelService/GetModelStatus": Row(Need.DESCRIBE, "model_spec.name"),
    "ModelService/HandleReloadConfigRequest": Row(Need.WRITE, changes=True),
}
#: by full name of the method
GRPC: dict[str, Row] = {
    **{f"{_INFERENCE}{name}": row for name, row in _GRPC_INFERENCE.items()},
    **{f"/tensorflow.serving.{name}": row for name, row in _GRPC_TFSERVING.items()},
    "/grpc.health.v1.Health/Check": Row(Need.OPEN),
    "/grpc.health.v1.Health/Watch": Row(Need.OPEN),
    **{f"{service}ServerReflectionInfo": LIST for service in _REFLECTION},
}
