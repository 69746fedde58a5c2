"""The admin API over versions that are there, and who may use it, over a real repository."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from millstream.services.model.manifest import Manifest, ModelConfig
from millstream.services.repository.endpoint_changes import activate_version
from millstream.services.wire.records import State
from tests.kit.application import TOKEN, Application
from tests.kit.catalog import instance, worker
from tests.kit.versions import publish

pytestmark = pytest.mark.anyio
ADMIN = "/admin/v1"


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def application(tmp_path: Path) -> Application:
    return Application(tmp_path)


@pytest.fixture
async def client(application: Application) -> AsyncIterator[httpx2.AsyncClient]:
    async with application.client() as client:
        yield client


@pytest.fixture
async def versions(application: Application) -> list[Manifest]:
    """Model m: version 1 active and ready, 2 ready, 3 failed."""
    found = [publish(application.repository, "m", number) for number in (1, 2, 3)]
    activate_version(application.repository, "m", 1)
    await application.catalog.set_workers(
        worker(instance(found[0]), instance(found[1]), instance(found[2], State.FAILED, "no such operator"))
    )
    return found


async def test_a_version_is_described_in_full(client: httpx2.AsyncClient, versions: list[Manifest]) -> None:
    reply = await client.get(f"{ADMIN}/models/m/versions/1")
    assert reply.status_code == 200
    document = reply.json()
    assert document.pop("usage")["sentence"] == "tensors: x FP32 [-1, 4]"
    assert document == {
        "model": "m",
        "version": 1,
        "state": "ready",
        "reason": None,
        "digest": versions[0].digest,
        "size_bytes": versions[0].files[0].size_bytes,
        "created": versions[0].created,
        "pools": ["cpu"],
        "active": True,
        "batching": True,
        "batching_decided": "proven",
        "batching_reason": None,
        "rows_max": 64,
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4], "on_request": False}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 2], "on_request": False}],
        "notes": ["made for a test"],
        "instances": [
            {
                "worker": "cpu-1",
                "state": "ready",
                "reason": None,
                "profile": {"1": 0.001, "2": 0.0015},
                "size_bytes": 1234,
                "variant": None,
            }
        ],
        "load_failures": [],
        "variants": [],
        "races": [],
        "imported": None,
        "graph": None,
        "steps": [],
        "function": None,
        "errors": [],
    }


async def test_a_failed_version_says_why(client: httpx2.AsyncClient, versions: list[Manifest]) -> None:
    version = (await client.get(f"{ADMIN}/models/m/versions/3")).json()
    assert (version["state"], version["reason"], version["active"]) == ("failed", "no such operator", False)


async def test_a_model_lists_its_versions(client: httpx2.AsyncClient, versions: list[Manifest]) -> None:
    model = (await client.get(f"{ADMIN}/models/m")).json()
    assert (model["name"], model["active"], model["serving"]) == ("m", 1, 1)
    assert [(one["version"], one["state"]) for one in model["versions"]] == [(1, "ready"), (2, "ready"), (3, "failed")]
    assert all(one["usage"]["kind"] == "tensors" for one in model["versions"])
    model["versions"] = [one | {"usage": None} for one in model["versions"]]  # the list is short
    assert (await client.get(f"{ADMIN}/models")).json() == {"models": [model]}


async def test_no_models(client: httpx2.AsyncClient) -> None:
    assert (await client.get(f"{ADMIN}/models")).json() == {"models": []}


async def test_uploads_in_progress_are_among_the_versions(
    application: Application, client: httpx2.AsyncClient, versions: list[Manifest]
) -> None:
    await application.catalog.set_upload("m", None, State.RECEIVING)
    await application.catalog.set_upload("m", 9, State.CHECKING)
    await application.catalog.set_upload("m", 1, State.RECEIVING)
    await application.catalog.set_upload("new", 4, State.CHECKING)
    model = (await client.get(f"{ADMIN}/models/m")).json()
    assert [(one["version"], one["state"]) for one in model["versions"]] == [
        (1, "ready"),
        (2, "ready"),
        (3, "failed"),
        (9, "checking"),
        (None, "receiving"),
    ]
    assert [one["name"] for one in (await client.get(f"{ADMIN}/models")).json()["models"]] == ["m", "new"]
    version = (await client.get(f"{ADMIN}/models/new/versions/4")).json()
    assert (version["state"], version["digest"], version["instances"]) == ("checking", None, [])


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "nope"),
        ("GET", "nope/versions/1"),
        ("GET", "m/versions/7"),
        ("POST", "nope/versions/1/activate"),
        ("POST", "m/versions/7/activate"),
        ("DELETE", "nope"),
        ("DELETE", "nope/versions/1"),
        ("DELETE", "m/versions/7"),
    ],
)
async def test_unknown_models_and_versions_are_404(
    client: httpx2.AsyncClient, versions: list[Manifest], method: str, path: str
) -> None:
    reply = await client.request(method, f"{ADMIN}/models/{path}")
    assert reply.status_code == 404
    assert "nope" in reply.json()["error"] or "version 7" in reply.json()["error"]


@pytest.mark.parametrize(("method", "suffix"), [("GET", ""), ("DELETE", ""), ("PUT", ""), ("POST", "/activate")])
@pytest.mark.parametrize("version", ["one", "1.5", "9" * 5000])
async def test_a_version_that_is_no_number_is_400(
    client: httpx2.AsyncClient, method: str, suffix: str, version: str
) -> None:
    reply = await client.request(method, f"{ADMIN}/models/m/versions/{version}{suffix}")
    assert reply.status_code == 400
    assert reply.json()["error"].startswith("path parameter 'version': ")


async def test_activating_moves_the_name_to_the_version(
    application: Application, client: httpx2.AsyncClient, versions: list[Manifest]
) -> None:
    reply = await client.post(f"{ADMIN}/models/m/versions/2/activate")
    assert reply.status_code == 200
    assert (reply.json()["active"], reply.json()["serving"]) == (2, 2)
    assert application.repository.endpoint("m").active == 2
    assert application.catalog.announced == ["m"]


async def test_activating_a_failed_version_is_refused(
    application: Application, client: httpx2.AsyncClient, versions: list[Manifest]
) -> None:
    reply = await client.post(f"{ADMIN}/models/m/versions/3/activate")
    assert reply.status_code == 409
    assert "no such operator; `millstream load m` (POST /v2/repository/models/m/load) tries" in reply.json()["error"]
    assert application.repository.endpoint("m").active == 1


async def test_deleting_a_version_that_does_not_serve(
    application: Application, client: httpx2.AsyncClient, versions: list[Manifest]
) -> None:
    reply = await client.delete(f"{ADMIN}/models/m/versions/2")
    assert (reply.status_code, reply.content) == (204, b"")
    assert list(application.repository.versions("m")) == [1, 3]
    assert application.repository.endpoint("m").active == 1
    assert application.catalog.announced == ["m"]
    assert (await client.get(f"{ADMIN}/models/m/versions/2")).status_code == 404


async def test_the_serving_version_is_kept_unless_forced(
    application: Application, client: httpx2.AsyncClient, versions: list[Manifest]
) -> None:
    reply = await client.delete(f"{ADMIN}/models/m/versions/1")
    assert reply.status_code == 409
    assert "force=true" in reply.json()["error"]
    assert list(application.repository.versions("m")) == [1, 2, 3]
    assert (await client.delete(f"{ADMIN}/models/m/versions/1?force=true")).status_code == 204
    assert list(application.repository.versions("m")) == [2, 3]
    assert application.repository.endpoint("m").active is None


async def test_deleting_an_active_version_that_failed_goes_back_to_the_one_that_serves(
    application: Application, client: httpx2.AsyncClient, versions: list[Manifest]
) -> None:
    activate_version(application.repository, "m", 3)
    assert (await client.delete(f"{ADMIN}/models/m/versions/3")).status_code == 204
    endpoint = application.repository.endpoint("m")
    assert (endpoint.active, endpoint.previous) == (1, None)


async def test_a_failed_version_is_not_kept_though_no_other_answers(
    application: Application, client: httpx2.AsyncClient, versions: list[Manifest]
) -> None:
    activate_version(application.repository, "m", 3)
    failed = [instance(manifest, State.FAILED) for manifest in versions]
    await application.catalog.set_workers(worker(*failed))
    assert (await client.delete(f"{ADMIN}/models/m/versions/3")).status_code == 204
    assert list(application.repository.versions("m")) == [1, 2]


async def test_the_model_goes_with_its_only_version(application: Application, client: httpx2.AsyncClient) -> None:
    manifest = publish(application.repository, "m", 1)
    activate_version(application.repository, "m", 1)
    await application.catalog.set_workers(worker(instance(manifest)))
    assert (await client.delete(f"{ADMIN}/models/m/versions/1")).status_code == 409
    assert (await client.delete(f"{ADMIN}/models/m/versions/1?force=true")).status_code == 204
    assert (await client.get(f"{ADMIN}/models/m")).status_code == 404


async def test_a_version_without_an_endpoint_may_go(application: Application, client: httpx2.AsyncClient) -> None:
    publish(application.repository, "m", 1)
    assert (await client.delete(f"{ADMIN}/models/m/versions/1")).status_code == 204
    assert (await client.get(f"{ADMIN}/models/m")).status_code == 404


async def test_deleting_a_model(application: Application, client: httpx2.AsyncClient, versions: list[Manifest]) -> None:
    assert (await client.delete(f"{ADMIN}/models/m")).status_code == 204
    assert list(application.repository.models()) == []
    assert application.catalog.announced == ["m"]
    assert (await client.get(f"{ADMIN}/models/m")).status_code == 404


async def test_pools_count_workers_and_what_is_ready(
    application: Application, client: httpx2.AsyncClient, versions: list[Manifest]
) -> None:
    publish(application.repository, "vision", 1, ModelConfig(pools=("gpu",)))
    await application.catalog.refresh()
    assert (await client.get(f"{ADMIN}/pools")).json() == {
        "pools": [
            {
                "name": "cpu",
                "workers": 1,
                "devices": ["cpu"],
                "backends": ["onnxruntime"],
                "versions": 3,
                "instances": 3,
                "instances_ready": 2,
            },
            {
                "name": "gpu",
                "workers": 0,
                "devices": [],
                "backends": [],
                "versions": 1,
                "instances": 0,
                "instances_ready": 0,
            },
        ]
    }


async def test_workers_say_what_they_hold_and_when_they_were_heard(
    application: Application, client: httpx2.AsyncClient, versions: list[Manifest]
) -> None:
    in_the_future = worker(name="cpu-2", heartbeat=4e9)
    await application.catalog.set_workers(in_the_future, worker(instance(versions[0]), heartbeat=1.0))
    one, two = (await client.get(f"{ADMIN}/workers")).json()["workers"]
    assert one.pop("heartbeat_age_s") > 1e9
    assert one == {
        "id": "cpu-1",
        "pool": "cpu",
        "device": "cpu",
        "backend": "onnxruntime",
        "pid": 4711,
        "host": "here",
        "started": 1.0,
        "clock_ahead_s": None,
        "hardware": None,
        "packages": {},
        "instances": [
            {
                "model": "m",
                "version": 1,
                "state": "ready",
                "reason": None,
                "profile": {"1": 0.001, "2": 0.0015},
                "rows_max": 64,
                "size_bytes": 1234,
            }
        ],
    }
    assert (two["id"], two["heartbeat_age_s"], two["instances"]) == ("cpu-2", 0.0, [])


_ROUTES = [
    ("GET", "models"),
    ("GET", "models/m"),
    ("DELETE", "models/m"),
    ("POST", "models/m/versions"),
    ("GET", "models/m/versions/1"),
    ("PUT", "models/m/versions/1"),
    ("DELETE", "models/m/versions/1"),
    ("POST", "models/m/versions/1/activate"),
    ("GET", "pools"),
    ("GET", "workers"),
]


@pytest.mark.parametrize("key", ["", "secret"])
@pytest.mark.parametrize(("method", "path"), _ROUTES)
async def test_every_route_asks_for_a_key_wherever_the_caller_seems_to_be(
    tmp_path: Path, method: str, path: str, key: str
) -> None:
    settings = {"admin_key": key} if key else {}
    application = Application(tmp_path, allowed_hosts="millstream.example", **settings)
    for address, host in (("192.0.2.7", "millstream.example"), ("127.0.0.1", "127.0.0.1"), ("::1", "localhost")):
        async with application.client(address=address, base_url=f"http://{host}", operator=False) as client:
            for given in (None, b"Bearer wrong", b"Bearer ", b"Bearer schl\xfcssel", b"Basic c2VjcmV0", b"Bearer mt_"):
                headers = {} if given is None else {b"Authorization": given}
                reply = await client.request(method, f"{ADMIN}/{path}", headers=headers)
                assert reply.status_code == 401
                assert reply.headers["www-authenticate"] == "Bearer"
                assert "key" in reply.json()["error"]
                assert "secret" not in reply.text


async def test_the_key_and_the_token_open_the_admin_api_from_anywhere(tmp_path: Path) -> None:
    application = Application(tmp_path, admin_key="secret", allowed_hosts="millstream.example")
    async with application.client(address="192.0.2.7", base_url="http://millstream.example", operator=False) as client:
        for key in ("secret", TOKEN):
            headers = {"Authorization": f"Bearer {key}", "Origin": "http://console.example"}
            assert (await client.get(f"{ADMIN}/models", headers=headers)).status_code == 200
        assert (await client.get("/v2/models")).status_code == 200
