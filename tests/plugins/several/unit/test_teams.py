"""A tenant with all rights over team-a-* tries every route and every gRPC method against the models of team b.

Rows that name no model in their path are sorted by hand below: a new route that is in no set fails here.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from google.protobuf.message_factory import GetMessageClass
from tritonclient.grpc import service_pb2 as pb

from millstream.services.access.scopes import Need
from millstream.services.repository.endpoint_changes import activate_version
from tests.kit import models
from tests.kit.access_rows import GRPC, HTTP, url_of
from tests.kit.application import OPERATOR, Application
from tests.kit.catalog import instance, worker
from tests.kit.versions import publish
from tests.plugins.several.unit.test_access_table import METHODS, about_model, method_refused

pytestmark = pytest.mark.anyio

OURS, THEIRS = "team-a-m", "team-b-secret"
#: GETs and POSTs that list what there is: they show nothing of others
LISTS = {
    ("GET", "/v2/models"),
    ("GET", "/v2/models/stats"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/{repository}/index"),
    ("GET", "/v1/models"),
    ("GET", "/openai/v1/models"),
    ("GET", "/models"),
    ("GET", "/admin/v1/models"),
    ("GET", "/admin/v1/placement"),
    ("GET", "/admin/v1/pools"),
    ("GET", "/admin/v1/workers"),
    ("GET", "/admin/v1/audit"),
}
#: the model is in the body, a header or the query
NAMED_ELSEWHERE: dict[tuple[str, str], dict[str, Any]] = {
    ("POST", "/invocations"): {"headers": {"X-Amzn-SageMaker-Target-Model": THEIRS}, "json": {"instances": [[1]]}},
    ("POST", "/endpoints/{endpoint}/invocations"): {"json": {"instances": [[1]]}},
    ("POST", "/endpoints/{endpoint}/invocations-response-stream"): {"json": {"instances": [[1]]}},
    ("POST", "/openai/v1/embeddings"): {"json": {"model": THEIRS, "input": [1]}},
    ("POST", "/v1/embeddings"): {"json": {"model": THEIRS, "input": [1]}},
    ("POST", "/v1/rerank"): {"json": {"model": THEIRS, "query": "a", "documents": ["b"]}},
    ("POST", "/v2/rerank"): {"json": {"model": THEIRS, "query": "a", "documents": ["b"]}},
    ("POST", "/rerank"): {"json": {"model": THEIRS, "query": "a", "texts": ["b"]}},
    ("POST", "/classify"): {"json": {"model": THEIRS, "input": "a"}},
    ("POST", "/models"): {"json": {"model_name": THEIRS, "url": "m.onnx"}},
}
#: they are about no model
OF_NO_MODEL = {
    ("GET", "/v2/trace/setting"),
    ("GET", "/v2/logging"),
    ("GET", "/admin/v1/log-level"),
    ("GET", "/admin/v1/scale"),
    ("GET", "/admin/v1/scale/{pool}"),
    ("GET", "/admin/v1/scale/{pool}/changes"),
    ("POST", "/endpoints/{endpoint}/async-invocations"),
}
#: `test_console.py` has a reader of one model
OF_THE_CONSOLE = {("GET", f"/console/api/{name}") for name in ("events", "history", "requests")}
SCOPES = ["infer:team-a-*", "models:read:team-a-*", "models:write:team-a-*"]


@pytest.fixture
async def application(tmp_path: Path) -> Application:
    imports = tmp_path / "imports"
    imports.mkdir()
    made = Application(tmp_path / "home", grpc_port=0, import_dir=imports)
    shutil.copy(models.scale(tmp_path / "m.onnx"), imports / f"{THEIRS}.onnx")
    held = [publish(made.repository, name, 1) for name in (OURS, THEIRS)]
    for name in (OURS, THEIRS):
        activate_version(made.repository, name, 1)
    await made.catalog.set_workers(worker(*map(instance, held)))
    return made


@pytest.fixture
async def tenant(application: Application) -> AsyncIterator[httpx2.AsyncClient]:
    async with application.client() as client:
        created = await client.post("/admin/v1/keys", json={"name": "team-a", "scopes": SCOPES})
        client.headers["authorization"] = f"Bearer {created.json()['key']}"
        yield client


async def test_no_route_gives_a_tenant_a_model_of_others(application: Application, tenant: httpx2.AsyncClient) -> None:
    for (method, path), row in HTTP.items():
        if row.need in {Need.OPEN, Need.METRICS, Need.MEMORY}:
            continue
        if row.need is Need.ADMIN:
            asked = url_of(path, THEIRS)
        elif row.model is not None:
            asked = url_of(path, THEIRS)
            ours = None if row.need is Need.INFER else await tenant.request(method, url_of(path, OURS), content=b"{")
            assert ours is None or ours.status_code not in {401, 403}, (method, path, ours.text)
        elif (method, path) in LISTS | OF_NO_MODEL | OF_THE_CONSOLE or (method, path) in NAMED_ELSEWHERE:
            continue
        else:
            raise AssertionError(f"{method} {path} names no model in its path: say in this file how it is checked")
        for body in (b"", b"{}", b"{"):
            reply = await tenant.request(method, asked, content=body)
            assert reply.status_code == 403, (method, path, reply.text)
            assert "team-a" in reply.text
    assert list(application.repository.versions(THEIRS)) == [1]


async def test_no_list_shows_a_tenant_a_model_of_others(application: Application, tenant: httpx2.AsyncClient) -> None:
    for name in (OURS, THEIRS):
        await tenant.patch(f"/admin/v1/models/{name}", json={"pin": True}, headers=OPERATOR)
    for method, path in LISTS:
        reply = await tenant.request(method, path.replace("{repository}", "r"))
        assert reply.status_code in {200, 501}, (path, reply.text)
        assert "team-b" not in reply.text, path
        if reply.status_code == 200 and path != "/admin/v1/pools":
            assert OURS in reply.text, path
        everything = await tenant.request(method, path.replace("{repository}", "r"), headers=OPERATOR)
        assert everything.status_code != 200 or path == "/admin/v1/pools" or THEIRS in everything.text, path
    pools = [(await tenant.get("/admin/v1/pools", headers=headers)).json() for headers in (None, OPERATOR)]
    assert [one["pools"][0]["instances"] for one in pools] == [1, 2]
    assert (await tenant.get("/admin/v1/placement", params={"model": THEIRS})).status_code == 404
    assert (await tenant.get("/openapi.json")).text.count("team-") == 0


async def test_a_model_that_is_named_elsewhere_is_checked(application: Application, tenant: httpx2.AsyncClient) -> None:
    for (method, path), sent in NAMED_ELSEWHERE.items():
        reply = await tenant.request(method, url_of(path, THEIRS), **sent)
        assert reply.status_code == 403, (path, reply.text)
    for query in ({"url": f"{THEIRS}.onnx"}, {"url": f"{THEIRS}.onnx", "model_name": THEIRS}):
        assert (await tenant.post("/models", params=query)).status_code == 403
    reply = await tenant.post("/models", params={"url": f"{THEIRS}.onnx", "model_name": "team-a-n"})
    assert reply.status_code == 200, reply.text
    near = await tenant.get("/v2/models/team-a-secret")
    assert (near.status_code, "team-b" in near.text) == (404, False)


#: methods whose message names no model, with what they answer a tenant
LIST_METHODS = {"RepositoryIndex", "ModelStatistics"}
OF_NO_MODEL_METHODS = {"LogSettings", "ServerReflectionInfo", "HandleReloadConfigRequest"}


async def test_no_method_gives_a_tenant_a_model_of_others(application: Application, tenant: httpx2.AsyncClient) -> None:
    metadata = (("authorization", tenant.headers["authorization"]),)
    async with application.grpc_channel() as channel:
        for method, row in GRPC.items():
            if row.need in {Need.OPEN, Need.MEMORY}:
                continue
            name = method.rpartition("/")[2]
            if row.model is None and row.need is not Need.INFER:
                assert name in LIST_METHODS | OF_NO_MODEL_METHODS, f"{method} names no model: say how it is checked"
                continue
            assert await method_refused(channel, method, metadata, about_model(method, THEIRS)), method
        for name in LIST_METHODS:
            asked, answer = (
                GetMessageClass(METHODS[f"inference.GRPCInferenceService/{name}"].input_type),
                getattr(pb, f"{name}Response"),
            )
            shown = await _answer(channel, name, asked().SerializeToString(), metadata)
            assert "team-b" not in str(answer.FromString(shown))
            everything = await _answer(channel, name, asked().SerializeToString(), tuple(OPERATOR.items()))
            assert THEIRS in str(answer.FromString(everything)), name
        traced = pb.TraceSettingRequest(model_name=THEIRS, settings={"trace_rate": {"value": ["1"]}})
        name = "/inference.GRPCInferenceService/TraceSetting"
        assert await method_refused(channel, name, metadata, traced.SerializeToString())
        everywhere = pb.TraceSettingRequest(settings={"trace_rate": {"value": ["1"]}}).SerializeToString()
        assert await method_refused(channel, name, metadata, everywhere)
        ours = pb.TraceSettingRequest(model_name=OURS, settings={"trace_rate": {"value": ["1"]}}).SerializeToString()
        assert not await method_refused(channel, name, metadata, ours)


async def _answer(channel: grpc.aio.Channel, name: str, body: bytes, metadata: tuple[tuple[str, str], ...]) -> bytes:
    answer: bytes = await channel.unary_unary(f"/inference.GRPCInferenceService/{name}")(body, metadata=metadata)
    return answer


async def test_scopes_of_a_glob_are_told_apart(application: Application) -> None:
    async with application.client() as operator:
        for name, scope, statuses in (
            ("reader", "models:read:team-a-*", (200, 403, 403)),
            ("writer", "models:write:team-a-*", (200, 403, 200)),
            ("everything", "models:write", (200, 200, 200)),
            ("caller", "infer:team-a-*", (403, 403, 403)),
        ):
            created = await operator.post("/admin/v1/keys", json={"name": name, "scopes": [scope]})
            headers = {"authorization": f"Bearer {created.json()['key']}"}
            found = (
                (await operator.get(f"/admin/v1/models/{OURS}", headers=headers)).status_code,
                (await operator.get(f"/admin/v1/models/{THEIRS}", headers=headers)).status_code,
                (await operator.patch(f"/admin/v1/models/{OURS}", json={"pin": True}, headers=headers)).status_code,
            )
            assert found == statuses, name
        wrong = await operator.post("/admin/v1/keys", json={"name": "x", "scopes": ["models:write:"]})
        assert (wrong.status_code, "after 'models:write:'" in json.loads(wrong.text)["error"]) == (400, True)
