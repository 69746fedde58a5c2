"""table: the authorisation table: what each HTTP route and each gRPC method needs. Pure.

A route or method without a row is refused. tests/unit/test_access_table.py walks all routes and methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


#: a list of models, which shows those that the caller may describe
_LIST = Row(Need.DESCRIBE)
_VERSIONED = ("", "/versions/{version}")
_LABELLED = (*_VERSIONED, "/labels/{label}")


def _v2() -> Iterator[tuple[str, str, Row]]:
    run, describe = Row(Need.INFER, "model"), Row(Need.DESCRIBE, "model")
    for version in _VERSIONED:
        path = f"/v2/models/{{model}}{version}"
        for call in ("infer", "generate", "generate_stream"):
            yield "POST", f"{path}/{call}", run
        for rest in ("", "/ready", "/stats", "/config"):
            yield "GET", f"{path}{rest}", describe
    for path in ("/v2", "/v2/", "/v2/health/live", "/v2/health/ready"):
        yield "GET", path, Row(Need.OPEN)
    for path in ("/v2/models", "/v2/models/stats"):
        yield "GET", path, _LIST
    for path in ("/v2/trace/setting", "/v2/logging"):
        yield "GET", path, Row(Need.DESCRIBE)
        yield "POST", path, Row(Need.ADMIN, changes=True)
    yield "GET", "/v2/models/{model}/trace/setting", describe
    yield "POST", "/v2/models/{model}/trace/setting", Row(Need.WRITE, "model", changes=True)
    for kind in ("system", "cuda"):
        memory = f"/v2/{kind}sharedmemory"
        yield "GET", f"{memory}/status", Row(Need.MEMORY)
        yield "GET", f"{memory}/region/{{region}}/status", Row(Need.MEMORY)
        for path in ("/region/{region}/register", "/region/{region}/unregister", "/unregister"):
            yield "POST", f"{memory}{path}", Row(Need.MEMORY, changes=True)
    yield "POST", "/v2/repository/index", _LIST
    yield "POST", "/v2/repository/{repository}/index", _LIST
    for call in ("load", "unload"):
        yield "POST", f"/v2/repository/models/{{model}}/{call}", Row(Need.WRITE, "model", changes=True)
        yield "POST", f"/v2/repository/{{repository}}/models/{{model}}/{call}", Row(Need.WRITE, "model", changes=True)


def _v1() -> Iterator[tuple[str, str, Row]]:
    yield "GET", "/v1/models", _LIST
    for version in _LABELLED:
        path = f"/v1/models/{{model}}{version}"
        yield "GET", path, Row(Need.DESCRIBE, "model")
        yield "GET", f"{path}/metadata", Row(Need.DESCRIBE, "model")
        for call in ("predict", "classify", "regress"):
            yield "POST", f"{path}:{call}", Row(Need.INFER, "model")
    yield "POST", "/v1/models/{model}:explain", Row(Need.INFER, "model")


def _others() -> Iterator[tuple[str, str, Row]]:
    run = Row(Need.INFER)  # the model is in a header or the body
    for path in ("/ping", "/version"):
        yield "GET", path, Row(Need.OPEN)
    yield "POST", "/invocations", run
    for call in ("invocations", "invocations-response-stream", "async-invocations"):
        yield "POST", f"/endpoints/{{endpoint}}/{call}", run
    yield "POST", "/models/{model}/invoke", Row(Need.INFER, "model")
    for path in ("/openai/v1/embeddings", "/v1/embeddings"):
        yield "POST", path, run
    yield "GET", "/openai/v1/models", _LIST
    for path in ("/predictions/{model}", "/predictions/{model}/{version}", "/explanations/{model}"):
        yield "POST", path, Row(Need.INFER, "model")
    yield "GET", "/api-description", Row(Need.OPEN)
    yield "OPTIONS", "/", Row(Need.OPEN)
    yield "GET", "/models", _LIST
    yield "POST", "/models", Row(Need.WRITE, changes=True)
    one = "/models/{model}"
    for path in (one, f"{one}/all", f"{one}/{{version}}"):
        yield "GET", path, Row(Need.DESCRIBE, "model")
    for method, path in (
        ("PUT", one),
        ("PUT", f"{one}/{{version}}"),
        ("PUT", f"{one}/{{version}}/set-default"),
        ("DELETE", one),
        ("DELETE", f"{one}/{{version}}"),
    ):
        yield method, path, Row(Need.WRITE, "model", changes=True)


def _admin() -> Iterator[tuple[str, str, Row]]:
    for method, path, row in _admin_rows():
        yield method, path, row._replace(admin=True)


def _admin_rows() -> Iterator[tuple[str, str, Row]]:
    read, write = Row(Need.READ), Row(Need.WRITE, "name", changes=True)
    one = "/admin/v1/models/{name}"
    version = f"{one}/versions/{{version}}"
    for path in ("/admin/v1/models", "/admin/v1/placement", "/admin/v1/pools", "/admin/v1/workers"):
        yield "GET", path, read
    for path in (one, version, f"{version}/race", f"{one}/settings"):
        yield "GET", path, Row(Need.READ, "name")
    for method, path in (
        ("PATCH", one),
        ("DELETE", one),
        ("PUT", version),
        ("DELETE", version),
        ("POST", f"{one}/versions"),
        ("POST", f"{version}/activate"),
        ("POST", f"{version}/race"),
        ("DELETE", f"{version}/race"),
        ("POST", f"{version}/race/undo"),
        ("PUT", f"{version}/race/samples"),
    ):
        yield method, path, write
    keys = "/admin/v1/keys"
    for method, path, row in (
        ("GET", keys, Row(Need.ADMIN)),
        ("GET", f"{keys}/{{key}}", Row(Need.ADMIN)),
        ("POST", keys, Row(Need.ADMIN, changes=True)),
        ("PATCH", f"{keys}/{{key}}", Row(Need.ADMIN, changes=True)),
        ("POST", f"{keys}/{{key}}/rotate", Row(Need.ADMIN, changes=True)),
        ("DELETE", f"{keys}/{{key}}", Row(Need.ADMIN, changes=True)),
        ("GET", "/admin/v1/audit", read),
        ("GET", "/admin/v1/log-level", read),
        ("PUT", "/admin/v1/log-level", Row(Need.ADMIN, changes=True)),
        ("GET", "/admin/v1/scale", read),
        ("GET", "/admin/v1/scale/{pool}", read),
    ):
        yield method, path, row


def _operation() -> Iterator[tuple[str, str, Row]]:
    for path in ("/", "/openapi.json", "/docs", "/docs/assets/{name}"):
        yield "GET", path, Row(Need.OPEN)
    yield "GET", "/metrics", Row(Need.METRICS)


#: by method and template of the path
HTTP: dict[tuple[str, str], Row] = {
    (method, path): row for rows in (_v2, _v1, _others, _admin, _operation) for method, path, row in rows()
}
#: by name, of routes whose paths the settings name
NAMED: dict[str, Row] = {"vertex_health": Row(Need.OPEN), "vertex_predict": Row(Need.INFER)}


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
    "RepositoryIndex": _LIST,
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
    **{f"{service}ServerReflectionInfo": _LIST for service in _REFLECTION},
}


def http_row(method: str, path: str | None, name: str | None = None) -> Row | None:
    """Return the row of a route; None: it has none, and is refused.

    Args:
        method: GET, …
        path: the template of its path.
        name: the name of the route.
    """
    return HTTP.get((method, path or "")) or NAMED.get(name or "")
