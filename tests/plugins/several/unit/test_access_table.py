"""The authorisation table: every route and every gRPC method has a row, and every scope is tried on each."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from operator import attrgetter
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import service_pb2 as pb

from millstream.gateway import app
from millstream.gateway.access.gate import Gate
from millstream.gateway.access.principal import CALLER
from millstream.gateway.connection.drain import Drain
from millstream.gateway.grpc.handlers import MethodTable
from millstream.gateway.v2 import routes_models as v2
from millstream.plugins.compat.tfserving.grpc import schema
from millstream.services.access.scopes import Grants, Need, Row, grants_of
from tests.kit.access_rows import GRPC, HTTP, url_of
from tests.kit.application import OPERATOR, Application

pytestmark = pytest.mark.anyio

SCOPES = (
    *("infer:m", "infer:other", "infer:*", "models:read", "models:read:m", "models:read:other", "models:write"),
    *("models:write:m", "models:write:other", "models:code", "models:network", "metrics", "shared-memory", "admin"),
)
_ABOUT_M = {
    "infer": {Need.OPEN, Need.INFER, Need.DESCRIBE},
    "models:read": {Need.OPEN, Need.DESCRIBE, Need.READ},
    "models:write": {Need.OPEN, Need.DESCRIBE, Need.READ, Need.WRITE},
    "models:code": {Need.OPEN},
    "models:network": {Need.OPEN},
    "metrics": {Need.OPEN, Need.METRICS},
    "shared-memory": {Need.OPEN, Need.MEMORY},
    "admin": set(Need),
}


def expected(scope: str, need: Need, *, named: bool) -> bool:
    """Whether a scope allows a call about the model "m", or one that names no model; independent of scopes.py."""
    kind, _, glob = scope.rpartition(":") if scope.count(":") == 2 or scope.startswith("infer") else (scope, "", "*")
    return need in _ABOUT_M[kind] and (need is Need.OPEN or not named or glob != "other")


FILES = (pb.DESCRIPTOR, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR, schema.FILE)
SERVICES: list[ServiceDescriptor] = [one for file in FILES for one in file.services_by_name.values()]
#: descriptions of the methods of these services, by `package.Service/Method`
METHODS = {f"{service.full_name}/{method.name}": method for service in SERVICES for method in service.methods}
WAIT_S = 120.0


def routes(app: Any) -> list[Any]:
    """Return all routes of an application, also of routers that it includes."""
    found = []
    for route in app.routes:
        inner = getattr(route, "original_router", None)
        found += [route] if inner is None else routes(inner)
    return found


async def test_every_route_is_in_the_table(tmp_path: Path) -> None:
    vertex = {"vertex_health_route": "/h", "vertex_predict_route": "/p"}
    application = Application(tmp_path, **vertex)
    seen = {(method, one.path_format) for one in routes(application.app.router) for method in one.methods}
    assert seen == HTTP.keys() | {("GET", "/h"), ("POST", "/p")}
    async with application.client(operator=False) as client:
        assert (await client.get("/h")).status_code == 200
        assert (await client.post("/p")).json() == {"error": "there is no model yet: upload one"}


async def test_a_route_without_a_row_ismethod_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {key: row for key, row in v2.ADAPTER.access.items() if key != ("GET", "/v2/health/live")}
    monkeypatch.setattr(app, "CORE", (replace(v2.ADAPTER, access=rows),))
    application = Application(tmp_path)
    async with application.client() as client:
        reply = await client.get("/v2/health/live")
    assert (reply.status_code, "authorisation table" in reply.text) == (403, True)


def test_every_grpc_method_is_in_the_table() -> None:
    methods = {f"/{name}" for name in METHODS}
    served = {name for name in methods if "CudaSharedMemory" in name or name in GRPC}
    assert GRPC.keys() - methods == {"/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"}
    assert served <= GRPC.keys()


async def test_every_row_is_that_of_a_served_grpc_method(tmp_path: Path) -> None:
    table = MethodTable(Application(tmp_path).app.state.deps, Drain(), cast("Any", None))
    assert [name for name in GRPC if table.find(name) is None] == []


@pytest.mark.parametrize("scope", SCOPES)
def test_every_row_and_every_scope(scope: str) -> None:
    grants = grants_of([scope])
    for row in {*HTTP.values(), *GRPC.values()}:
        for model in ("m", None):
            assert grants.allows(row.need, model) == expected(scope, row.need, named=model is not None), (row, scope)


async def _keys(application: Application) -> dict[str, str]:
    """Make a key for each scope; return them by scope."""
    keys: dict[str, str] = {}
    async with application.client() as client:
        for scope in SCOPES:
            name = scope.replace(":", "-").replace("*", "all")
            admin = {"Authorization": f"Bearer {keys['admin']}"} if "admin" in keys else {}
            created = await client.post("/admin/v1/keys", json={"name": name, "scopes": [scope]}, headers=admin)
            assert created.status_code == 201, created.text
            keys[scope] = created.json()["key"]
    return keys


async def test_every_route_answers_every_scope_over_http(tmp_path: Path) -> None:
    application = Application(tmp_path)
    keys = await _keys(application)
    async with application.client(operator=False) as client:
        for ((method, path), row), scope in product(HTTP.items(), (*SCOPES, "")):
            url = url_of(path, "m")
            if (method, url) == ("POST", "/v2/models/m/infer") or url.startswith("/v2/models/m/versions/1/infer"):
                continue  # waits for the test to answer: tests/integration/test_access.py
            headers = {"Authorization": f"Bearer {keys[scope]}"} if scope else {}
            reply = await client.request(method, url, headers=headers, content=b"{")
            if reply.status_code == 404 and reply.text == '{"error":"Not Found"}':
                continue  # a row for a route to come
            refused = reply.status_code in {401, 403}
            allowed = row.need is Need.OPEN or (bool(scope) and _allowed(row, path, scope))
            assert refused is not allowed, (method, url, scope, reply.status_code, reply.text)
    assert not any(key in str(application.audit_text()) for key in keys.values())


#: live figures: without keys anybody reads them, as on the metrics page
WATCHED = frozenset({"/console/api/events", "/console/api/history"})


@pytest.mark.parametrize("open_control", [False, True])
async def test_without_keys_every_change_needs_the_token(tmp_path: Path, open_control: bool) -> None:
    application = Application(tmp_path, grpc_port=0, open_control=open_control)
    async with application.client(operator=False) as client:
        for (method, path), row in HTTP.items():
            if path.endswith("/infer"):
                continue  # waits for the test to answer
            needs_key = path.startswith(("/admin/", "/console/api/")) and row.need is not Need.OPEN
            needs_key = needs_key and path not in WATCHED
            closed = needs_key or (row.controls and not open_control)
            for headers, refused in ((None, closed), ({"X-API-Key": "mt_wrong"}, closed), (OPERATOR, False)):
                reply = await client.request(method, url_of(path, "m"), headers=headers, content=b"{")
                if reply.status_code == 404 and reply.text == '{"error":"Not Found"}':
                    continue  # a row for a route to come
                assert (reply.status_code in {401, 403}) is refused, (method, path, headers, reply.text)
    CALLER.set(None)  # the requests above ran in this task, the server below takes its context
    async with application.grpc_channel() as channel:
        for method, row in GRPC.items():
            closed = row.controls and row.of_message is None and not open_control
            for metadata, refused in (((), closed), (tuple(OPERATOR.items()), False)):
                assert await method_refused(channel, method, metadata) is refused, (method, metadata)
        for method, kind in (("TraceSetting", pb.TraceSettingRequest), ("LogSettings", pb.LogSettingsRequest)):
            message = kind()
            message.settings["no_such_setting"].SetInParent()
            name = f"/inference.GRPCInferenceService/{method}"
            assert await method_refused(channel, name, (), message.SerializeToString()) is not open_control
            assert not await method_refused(channel, name, tuple(OPERATOR.items()), message.SerializeToString())


async def test_every_method_answers_every_scope_over_grpc(tmp_path: Path) -> None:
    application = Application(tmp_path, grpc_port=0)
    keys = await _keys(application)
    async with application.grpc_channel() as channel:
        for (method, row), scope in product(GRPC.items(), (*SCOPES, "")):
            metadata = (("authorization", f"Bearer {keys[scope]}"),) if scope else ()
            named = row.model is not None or row.need is Need.INFER
            allowed = row.need is Need.OPEN or (bool(scope) and expected(scope, row.need, named=named))
            assert await method_refused(channel, method, metadata) is not allowed, (method, scope)


async def method_refused(
    channel: grpc.aio.Channel, method: str, metadata: tuple[tuple[str, str], ...], body: bytes | None = None
) -> bool:
    """Call a method about the model "m"; return whether the key was refused. On the wire each call is a stream."""
    body = about_model(method, "m") if body is None else body
    call = channel.unary_stream(method)(body, metadata=metadata, timeout=WAIT_S)
    try:
        reply = await call.read()
    except grpc.aio.AioRpcError as error:
        return error.code() in {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED}
    call.cancel()  # a health watch has no end
    if not method.endswith("/ModelStreamInfer"):
        return False
    return "lacks the scope" in pb.ModelStreamInferResponse.FromString(reply).error_message


def about_model(method: str, model: str) -> bytes:
    """Return a message of the method that names a model, if it has a field for that."""
    service, _, name = method[1:].rpartition("/")
    found = METHODS.get(f"{service.replace('.v1.S', '.v1alpha.S')}/{name}")
    assert found is not None, method
    message = GetMessageClass(found.input_type)()
    if name == "MultiInference":
        message.tasks.add(method_name="tensorflow/serving/classify").model_spec.name = model
    elif name.startswith("ModelInfer") or name == "ModelStreamInfer":
        message.model_name = model
    elif (field := GRPC[method].model) is not None:
        path = field.split(".")
        setattr(attrgetter(*path[:-1])(message) if path[:-1] else message, path[-1], model)
    encoded: bytes = message.SerializeToString()
    return encoded


def _allowed(row: Row, path: str, scope: str) -> bool:
    """Return what is expected. A model that the body names is checked later; none of these bodies can be read."""
    named = row.model is not None or (row.need is Need.INFER and path.endswith(("}/invocations", "-stream")))
    return expected(scope, row.need, named=named)


def test_globs_are_matched_as_a_whole_and_case_counts() -> None:
    grants = grants_of(["infer:re?net*"])
    assert [grants.infers(name) for name in ("resnet", "resnet50", "aresnet", "Resnet", "renet")] == [
        True,
        True,
        False,
        False,
        False,
    ]
    assert not grants_of(["infer:a.c"]).infers("abc")
    assert not Grants().allows(Need.METRICS)


def test_a_gate_without_keys_lets_everything_in() -> None:
    Gate().check_model("any")
