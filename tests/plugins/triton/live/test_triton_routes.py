"""The paths of Triton's model repository over a real repository, without workers: bad requests, states, who may."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import cast

import httpx2
import pytest

from millstream.gateway.catalog.catalog import Catalog
from millstream.plugins.compat.triton.await_ready import ReadyWaiter
from millstream.plugins.compat.triton.gateway import Triton
from millstream.plugins.compat.triton.loader import RepositoryLoader
from millstream.services.repository.endpoint_changes import activate_version
from millstream.services.wire.records import State
from tests.kit import models
from tests.kit.application import Application
from tests.kit.catalog import instance, worker
from tests.kit.versions import publish

pytestmark = pytest.mark.anyio
LOAD = "/v2/repository/models/m/load"
UNLOAD = "/v2/repository/models/m/unload"
INDEX = "/v2/repository/index"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def application(tmp_path: Path) -> Application:
    """Model m: version 1 ready and active, 2 loading, 3 failed. The folder has a model n, never loaded."""
    models.identity(_folder(tmp_path / "models" / "n" / "1") / "model.onnx")
    application = Application(tmp_path / "home", triton_repositories=str(tmp_path / "models"), upload_bytes_max=4096)
    one, two, three = (publish(application.repository, "m", number) for number in (1, 2, 3))
    activate_version(application.repository, "m", 1)
    await application.catalog.set_workers(
        worker(instance(one), instance(two, State.LOADING), instance(three, State.FAILED, "no such operator"))
    )
    return application


def _folder(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


@pytest.fixture
async def client(application: Application) -> AsyncIterator[httpx2.AsyncClient]:
    async with application.client() as client:
        yield client


async def test_the_index(client: httpx2.AsyncClient) -> None:
    reply = await client.post(INDEX)
    assert reply.json() == [
        {"name": "m", "version": "1", "state": "READY"},
        {"name": "m", "version": "2", "state": "LOADING"},
        {"name": "m", "version": "3", "state": "UNAVAILABLE", "reason": "no such operator"},
        {"name": "n"},
    ]
    ready = await client.post(INDEX, json={"ready": True})
    assert ready.json() == [{"name": "m", "version": "1", "state": "READY"}]
    assert (await client.get(INDEX)).status_code == 405


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        (INDEX, "[]", "a JSON object"),
        (INDEX, '{"ready": 1}', "ready"),
        (INDEX, "{", "failed to parse the request JSON buffer"),
        (INDEX, "\xff", "failed to parse the request JSON buffer"),
        (LOAD, '{"parameters": []}', "parameters: must be an object"),
        (LOAD, '{"parameters": {"config": 1}}', "parameter 'config': must be a string"),
        (LOAD, '{"parameters": {"config": null}}', "parameter 'config': must be a string"),
        (LOAD, '{"parameters": {"other": "x"}}', "unexpected parameter 'other'"),
        (LOAD, '{"parameters": {"config": "{}", "file:1/model.onnx": "a"}}', "this is not base64"),
        (LOAD, '{"parameters": {"config": "{}", "file:1/model.onnx": "YQ==\\n"}}', "this is not base64"),
        (LOAD, '{"parameters": {"config": "{}", "file:1/model.onnx": "ä"}}', "this is not base64"),
        (LOAD, '{"parameters": {"file:1/model.onnx": "YQ=="}}', "without a config"),
        (LOAD, '{"parameters": {"config": "[]"}}', "failed to load 'm', failed to poll from model repository: config"),
        (UNLOAD, '{"parameters": {"unload_dependents": "yes"}}', "unload_dependents"),
        (UNLOAD, '{"parameters": {"other": true}}', "'other'"),
        ("/v2/repository/models/nope/load", "", "failed to load 'nope', failed to poll from model repository"),
        ("/v2/repository/models/.x/load", "", "failed to load '.x', failed to poll from model repository: model name"),
    ],
)
async def test_bad_requests(client: httpx2.AsyncClient, path: str, body: str, says: str) -> None:
    reply = await client.post(path, content=body.encode("latin-1") if body == "\xff" else body.encode())
    assert reply.status_code == 400
    assert says in reply.json()["error"]
    assert (await client.get("/v2/models/m")).status_code == 200


async def test_limits(client: httpx2.AsyncClient) -> None:
    many = base64.b64encode(bytes(3000)).decode()
    files = {"config": "{}", "file:1/a": many, "file:1/b": many}
    reply = await client.post(LOAD, json={"parameters": files})
    assert reply.status_code == 413
    for path in (LOAD, INDEX, UNLOAD):
        assert (await client.post(path, content=b" " * (2 << 20))).status_code == 413


async def test_files_of_a_load_count_in_the_receive_budget(
    application: Application, client: httpx2.AsyncClient
) -> None:
    application.receive_budget.bytes_max = 100_000
    body = {"parameters": {"config": " " * 200_000}}
    reply = await client.post(LOAD, json=body)
    assert reply.status_code == 503
    assert "100000 bytes are being received" in reply.json()["error"]
    assert application.receive_budget.bytes == 0
    application.receive_budget.bytes_max = 1 << 20
    assert (await client.post(LOAD, json=body)).status_code == 400
    assert application.receive_budget.bytes == 0


async def test_unknown_models_are_unloaded_without_complaint(client: httpx2.AsyncClient) -> None:
    for name in ("nope", "n", ".x"):
        reply = await client.post(f"/v2/repository/models/{name}/unload")
        assert (reply.status_code, reply.json()) == (200, {"name": name, "unload": True})


async def test_unloading(application: Application, client: httpx2.AsyncClient) -> None:
    await client.post(UNLOAD, json={"parameters": {"unload_dependents": False}})
    for path in ("", "/ready", "/config", "/versions/1", "/versions/1/config", "/versions/1/ready"):
        reply = await client.get(f"/v2/models/m{path}")
        assert reply.status_code == 404
        assert "Request for unknown model: 'm'" in reply.json()["error"]
    states = {one.get("state") for one in (await client.post(INDEX)).json() if one["name"] == "m"}
    assert states == {"UNLOADING"}
    await application.catalog.set_workers(worker())
    states = {one.get("state") for one in (await client.post(INDEX)).json() if one["name"] == "m"}
    assert states == {"UNAVAILABLE"}
    assert application.catalog.announced == ["m"]


async def test_a_pool_without_workers(application: Application, client: httpx2.AsyncClient) -> None:
    await application.catalog.set_workers()
    catalog = cast("Catalog", application.catalog)
    control = RepositoryLoader(application.repository, catalog, application.settings, ReadyWaiter(catalog, 60, 0))
    before = application.repository.endpoint("m")
    with pytest.raises(Exception, match="failed to load 'n', version 1: pool 'cpu' has no worker"):
        await control.load("n", None, {})
    assert application.repository.staged.models() == []
    assert application.repository.endpoint("m") == before
    found = {entry.name: entry for entry in control.index(ready=False)}
    assert (found["n"].state, "has no worker" in found["n"].reason) == ("UNAVAILABLE", True)


def loader_of(application: Application) -> RepositoryLoader:
    return next(part for part in application.parts if isinstance(part, Triton)).loader


async def test_a_load_that_nobody_waits_for_leaves_nothing(application: Application) -> None:
    loading = asyncio.create_task(loader_of(application).load("n", None, {}))
    while not application.repository.staged.models():
        await asyncio.sleep(0.01)
    assert ("n", "LOADING") in {(entry.name, entry.state) for entry in loader_of(application).index(ready=False)}
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert application.repository.staged.models() == []
    assert "n" not in application.repository.models()
    lock = application.repository.staged.lock("n")
    assert lock is not None
    lock.release()


async def test_versions_that_a_dead_gateway_staged_are_aborted(application: Application) -> None:
    manifest = application.repository.manifest("m", 1).model_copy(update={"created": 5.0})
    application.repository.staged.stage([manifest])
    await loader_of(application).start()
    assert application.repository.staged.models() == []


async def test_repositories_have_no_names(client: httpx2.AsyncClient) -> None:
    for path in ("index", "models/m/load", "models/m/unload"):
        reply = await client.post(f"/v2/repository/mine/{path}")
        assert reply.status_code == 501
        assert "'repository_name' specification is not supported" in reply.json()["error"]


async def test_loading_is_for_operators(tmp_path: Path) -> None:
    closed = Application(tmp_path, admin_key="secret")
    publish(closed.repository, "m", 1)
    await closed.catalog.refresh()
    async with closed.client(operator=False) as client:
        assert (await client.post(INDEX)).status_code == 200
        for path in (LOAD, UNLOAD):
            assert (await client.post(path)).status_code == 401
        headers = {"Authorization": "Bearer secret"}
        assert (await client.post(UNLOAD, headers=headers)).status_code == 200
    for open_control in (False, True):
        keyless = Application(tmp_path / f"{open_control}", open_control=open_control)
        async with keyless.client(operator=False) as client:
            for path in (LOAD, UNLOAD):
                assert ((await client.post(path)).status_code == 401) is not open_control


async def test_the_documents_say_what_the_routes_do(client: httpx2.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert {"200", "400", "401", "403", "413", "503", "507"} <= set(
        paths["/v2/repository/models/{model}/load"]["post"]["responses"]
    )
    assert "404" in paths["/v2/models/{model}/config"]["get"]["responses"]


async def test_a_model_in_two_repositories_is_in_none(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        _folder(tmp_path / folder / "twice" / "1")
    both = Application(
        tmp_path / "home", triton_repositories=f"{tmp_path / 'a'},{tmp_path / 'b'},{tmp_path / 'nowhere'}"
    )
    async with both.client() as client:
        reply = await client.post("/v2/repository/models/twice/load")
        assert reply.status_code == 400
        assert "the model is in two repositories" in reply.json()["error"]
        assert str(tmp_path) not in reply.json()["error"]
        assert (await client.post(INDEX)).json() == [{"name": "twice"}]
