"""Uploads through the admin API: real ONNX models, the real check, a real repository."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from millstream.gateway.catalog.quotas import AT_ONCE_MAX
from millstream.services.wire.records import State
from tests.kit import models
from tests.kit.application import OPERATOR, Application, Exchange
from tests.kit.catalog import instance, worker
from tests.kit.versions import publish

pytestmark = pytest.mark.anyio
M = "/admin/v1/models/m/versions"
MIB = 1 << 20


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def application(tmp_path: Path) -> AsyncIterator[Application]:
    """Whatever a test does: no upload in progress and no staged file is left."""
    application = Application(tmp_path, upload_bytes_max=MIB)
    yield application
    assert application.catalog.uploads == {}
    assert list((application.settings.repository_dir / ".staging").glob("*")) == []


@pytest.fixture
async def client(application: Application) -> AsyncIterator[httpx2.AsyncClient]:
    async with application.client() as client:
        client.timeout = httpx2.Timeout(120)
        yield client


@pytest.fixture
def onnx(tmp_path: Path) -> bytes:
    return models.mlp(tmp_path / "mlp.onnx").read_bytes()


async def test_put_publishes_and_activates(application: Application, client: httpx2.AsyncClient, onnx: bytes) -> None:
    digest = hashlib.sha256(onnx).hexdigest()
    reply = await client.put(f"{M}/7", content=onnx, headers={"X-Content-SHA256": digest.upper()})
    assert reply.status_code == 201
    assert reply.headers["location"] == f"{M}/7"
    version = reply.json()
    assert (version["model"], version["version"], version["state"]) == ("m", 7, "pending")
    assert version["active"] is True
    assert version["digest"] == application.repository.manifest("m", 7).digest
    assert application.repository.endpoint("m").active == 7
    assert application.catalog.announced == ["m"]
    shown = application.catalog.upload_states
    assert {key for key, _ in shown} == {("m", 7)}
    assert [state for state, _ in itertools.groupby(state for _, state in shown)] == [
        State.RECEIVING,
        State.PENDING,
        State.CHECKING,
        None,
    ]
    assert version.pop("existing") is False
    assert (await client.get(reply.headers["location"])).json() == version
    again = await client.put(f"{M}/7", content=onnx)
    assert (again.status_code, again.json()) == (200, {**version, "existing": True})
    assert again.headers["location"] == f"{M}/7"


async def test_old_versions_are_deleted_where_that_is_set(tmp_path: Path, onnx: bytes) -> None:
    """Never the active or the previous one, whatever their numbers."""
    application = Application(tmp_path, versions_kept=2)
    rows = itertools.count(1)

    async def push(client: httpx2.AsyncClient, **params: str) -> None:
        config = f'{{"rows_max": {next(rows)}}}'
        assert (await client.post(M, params={"config": config, **params}, content=onnx)).status_code == 201

    async with application.client() as client:
        client.timeout = httpx2.Timeout(120)
        for _ in range(2):  # 1 was active before 2
            await push(client)
        for _ in range(4):
            await push(client, activate="false")
        assert application.repository.versions("m") == [1, 2, 5, 6]
        assert application.repository.endpoint("m").active == 2
        await push(client)  # 7 is active, 2 the previous one
        assert application.repository.versions("m") == [2, 6, 7]


async def test_post_takes_the_next_number(application: Application, client: httpx2.AsyncClient, onnx: bytes) -> None:
    publish(application.repository, "m", 4)
    reply = await client.post(M, content=onnx, headers={"Content-Type": "application/octet-stream"})
    assert reply.status_code == 201
    assert (reply.json()["version"], reply.headers["location"]) == (5, f"{M}/5")


async def test_activate_false_leaves_the_name_where_it_is(
    application: Application, client: httpx2.AsyncClient, onnx: bytes
) -> None:
    reply = await client.post(f"{M}?activate=false", content=onnx)
    assert (reply.status_code, reply.json()["active"]) == (201, False)
    assert application.repository.endpoint("m").active is None
    assert application.catalog.announced == ["m"]


@pytest.mark.parametrize("config_first", [True, False])
async def test_a_form_brings_its_config_before_or_after_the_model(
    application: Application, client: httpx2.AsyncClient, onnx: bytes, config_first: bool
) -> None:
    parts = [("config", (None, b'{"rows_max": 5}')), ("model", ("m.onnx", onnx))]
    reply = await client.post(M, files=parts if config_first else parts[::-1])
    assert (reply.status_code, reply.json()["rows_max"]) == (201, 5)
    assert application.repository.manifest("m", 1).config.rows_max == 5


async def test_config_as_a_parameter(application: Application, client: httpx2.AsyncClient, onnx: bytes) -> None:
    config = json.dumps({"rows_max": 3, "pools": ["fast"]})
    await application.catalog.set_workers(worker(name="fast-1", pool="fast"))
    reply = await client.post(M, params={"config": config}, content=onnx)
    assert (reply.status_code, reply.json()["rows_max"], reply.json()["pools"]) == (201, 3, ["fast"])


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("no json", "config: Invalid JSON"),
        ("[]", "config: "),
        ("[" * 100_000, "config: Invalid JSON"),
        ('{"rows_max": 0}', "config.rows_max: "),
        ('{"rows": 1}', "config: there is no field 'rows'"),
        ('{"pools": ["../x"]}', "config.pools '../x'"),
        ('{"pools": ["cpu", "tensorrt"]}', "config.pools: there is no pool 'tensorrt'; the pool is cpu"),
        ('{"pools": ["cpu", "cpu"]}', "each pool is named once"),
        ('{"pools": ["\\ud800"]}', "config"),
    ],
)
async def test_a_bad_config_is_refused_by_field(
    application: Application, client: httpx2.AsyncClient, onnx: bytes, config: str, says: str
) -> None:
    as_part = [("model", ("m.onnx", onnx)), ("config", (None, config.encode()))]
    replies = [await client.post(M, files=as_part)]
    if len(config) < 1000:
        replies.append(await client.post(M, params={"config": config}, content=onnx))
    for reply in replies:
        assert reply.status_code in {400, 413}
        assert says in reply.json()["error"] or reply.status_code == 413
    assert list(application.repository.models()) == []


async def test_a_config_given_twice_is_refused(client: httpx2.AsyncClient, onnx: bytes) -> None:
    parts = {"model": ("m.onnx", onnx), "config": (None, b"{}")}
    reply = await client.post(M, params={"config": "{}"}, files=parts)
    assert reply.status_code == 400
    assert "twice" in reply.json()["error"]


@pytest.mark.parametrize(
    ("path", "headers", "body", "status", "says"),
    [
        (f"{M}/1", {}, b"no model", 400, ""),
        (f"{M}/1", {}, b"", 400, ""),
        (f"{M}/0", {}, b"x", 400, "version 0"),
        (f"{M}/{2**31}", {}, b"x", 400, "version 2147483648"),
        ("/admin/v1/models/-m/versions/1", {}, b"x", 400, "'-m' is not allowed"),
        ("/admin/v1/models/a%20b/versions/1", {}, b"x", 400, "'a b' is not allowed"),
        ("/admin/v1/models/../versions/1", {}, b"x", 404, "Not Found"),
        (f"{M}/1", {"X-Content-SHA256": "abc"}, b"x", 400, "header parameter 'x-content-sha256'"),
        (f"{M}/1?wait=601", {}, b"x", 400, "query parameter 'wait'"),
        (f"{M}/1?wait=-1", {}, b"x", 400, "query parameter 'wait'"),
        (f"{M}/1?wait=nan", {}, b"x", 400, "query parameter 'wait'"),
        (f"{M}/1?activate=maybe", {}, b"x", 400, "query parameter 'activate'"),
        (f"{M}/1", {"Content-Encoding": "gzip"}, b"x", 415, "Content-Encoding"),
        (f"{M}/1", {"Content-Type": "multipart/form-data"}, b"x", 400, "boundary"),
        (f"{M}/1", {"Content-Type": "multipart/form-data; boundary=b"}, b"x", 400, "multipart"),
        (f"{M}/1", {"Content-Type": "multipart/form-data; boundary=b"}, b"--b--\r\n", 400, "no part 'model'"),
    ],
)
async def test_a_broken_upload_changes_nothing(
    application: Application,
    client: httpx2.AsyncClient,
    path: str,
    headers: dict[str, str],
    body: bytes,
    status: int,
    says: str,
) -> None:
    reply = await client.put(path, content=body, headers=headers)
    assert reply.status_code == status
    assert says in reply.json()["error"]
    assert list(application.repository.models()) == []
    assert application.catalog.announced == []


@pytest.mark.parametrize(
    ("content_type", "removed", "is_told"),
    [
        ("application/x-www-form-urlencoded", b"\n", True),
        ("application/x-www-form-urlencoded", b"\r", False),  # another fault than curl's
        ("application/octet-stream", b"\n", False),
    ],
)
async def test_a_file_that_curl_damaged_is_refused_with_advice(
    client: httpx2.AsyncClient, onnx: bytes, content_type: str, removed: bytes, is_told: bool
) -> None:
    body = onnx[: len(onnx) // 2].replace(removed, b"")
    reply = await client.post(M, content=body, headers={"Content-Type": content_type})
    assert reply.status_code == 400
    assert ("--data-binary" in reply.json()["error"]) is is_told, reply.text


async def test_a_wrong_digest_changes_nothing(
    application: Application, client: httpx2.AsyncClient, onnx: bytes
) -> None:
    reply = await client.put(f"{M}/1", content=onnx, headers={"X-Content-SHA256": "0" * 64})
    assert reply.status_code == 400
    assert list(application.repository.models()) == []


async def test_a_version_that_is_there_is_refused_before_its_body_is_read(application: Application) -> None:
    before = publish(application.repository, "m", 1)
    # nothing is fed: an application that waits for the body never ends
    assert await Exchange(application.app, "PUT", f"{M}/1", headers={"x-content-sha256": "0" * 64}).status() == 409
    assert application.repository.manifest("m", 1) == before


async def test_an_upload_over_the_limit_is_refused_unread(application: Application) -> None:
    assert await Exchange(application.app, "POST", M, headers={"content-length": str(MIB + 1)}).status() == 413


async def test_an_endless_upload_is_refused_at_the_limit(application: Application, client: httpx2.AsyncClient) -> None:
    exchange = Exchange(application.app, "POST", M)
    for _ in range(17):
        exchange.feed(b"\x08" * (MIB // 16), more=True)
    assert await exchange.status() == 413
    assert list(application.repository.models()) == []


async def test_a_large_upload_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    application = Application(tmp_path, upload_bytes_max=256 * MIB)
    chunk = b"\x08" * (MIB // 16)
    exchange = Exchange(application.app, "POST", M, headers={"x-content-sha256": "0" * 64})
    for _ in range(32 * 16):
        exchange.feed(chunk, more=True)  # the same object each time: it is the application's memory that counts
    exchange.feed(b"")
    tracemalloc.start()
    try:
        assert await exchange.status() == 400
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content_type", ["application/octet-stream", "multipart/form-data; boundary=b"])
async def test_a_client_that_goes_away_leaves_nothing(application: Application, content_type: str) -> None:
    exchange = Exchange(application.app, "POST", M, headers={"content-type": content_type})
    head = b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n' if "form" in content_type else b""
    exchange.feed(head + b"\x08" * 1000, more=True)
    exchange.disconnect()
    assert await exchange.status() == 499
    assert list(application.repository.models()) == []


async def test_more_uploads_than_the_limit_are_refused_until_one_ends(
    application: Application, client: httpx2.AsyncClient, onnx: bytes
) -> None:
    running = [Exchange(application.app, "POST", f"/admin/v1/models/m{n}/versions") for n in range(AT_ONCE_MAX)]
    await application.catalog.until(lambda: len(application.catalog.uploads) == AT_ONCE_MAX)
    shown = (await client.get("/admin/v1/models")).json()["models"]
    assert [(one["name"], one["versions"][0]["state"]) for one in shown] == [
        (f"m{n}", "receiving") for n in range(AT_ONCE_MAX)
    ]
    refused = await client.post(M, content=onnx)
    assert refused.status_code == 503
    assert refused.headers["retry-after"] == "5"
    for one in running:
        one.disconnect()
        assert await one.status() == 499
    assert (await client.post(M, content=onnx)).status_code == 201


async def test_slow_uploads_of_one_key_do_not_refuse_those_of_another(
    application: Application, client: httpx2.AsyncClient, onnx: bytes
) -> None:
    keys = {}
    for team in ("a", "b"):
        asked = {"name": team, "scopes": [f"models:write:team-{team}-*"]}
        made = (await client.post("/admin/v1/keys", json=asked)).json()
        keys[team] = {"authorization": f"Bearer {made['key']}"}
    paths = [f"/admin/v1/models/team-a-{n}/versions" for n in range(AT_ONCE_MAX)]
    slow = [Exchange(application.app, "POST", path, headers=keys["a"]) for path in paths]
    await application.catalog.until(lambda: len(application.catalog.uploads) == AT_ONCE_MAX)
    refused = await client.post("/admin/v1/models/team-a-m/versions", content=onnx, headers=keys["a"])
    assert refused.status_code == 503
    taken = await client.post("/admin/v1/models/team-b-m/versions", content=onnx, headers=keys["b"])
    assert taken.status_code == 201, taken.text
    for one in slow:
        one.disconnect()
        assert await one.status() == 499


async def test_two_uploads_of_one_model_stay_visible_until_both_end(application: Application) -> None:
    first, second = Exchange(application.app, "POST", M), Exchange(application.app, "POST", M)
    await application.catalog.until(lambda: len(application.catalog.upload_states) == 2)
    first.disconnect()
    assert await first.status() == 499
    assert application.catalog.uploads == {("m", None): State.RECEIVING}
    second.disconnect()
    assert await second.status() == 499


@pytest.mark.parametrize(("state", "reason"), [(State.READY, None), (State.FAILED, "no such operator")])
async def test_wait_ends_when_the_version_has_settled(
    application: Application, client: httpx2.AsyncClient, onnx: bytes, state: State, reason: str | None
) -> None:
    uploading = asyncio.create_task(client.put(f"{M}/1?wait=120", content=onnx))
    await application.catalog.until(lambda: "m" in application.catalog.snapshot.models)
    manifest = application.repository.manifest("m", 1)
    await application.catalog.set_workers(worker(instance(manifest, State.LOADING)))
    await application.catalog.set_workers(worker(instance(manifest, state, reason)))
    reply = await uploading
    assert (reply.status_code, reply.json()["state"], reply.json()["reason"]) == (201, state, reason)


async def test_wait_ends_when_its_time_is_up(client: httpx2.AsyncClient, onnx: bytes) -> None:
    reply = await client.put(f"{M}/1?wait=0.01", content=onnx)
    assert (reply.status_code, reply.json()["state"]) == (201, "pending")


async def test_wait_ends_when_the_version_is_deleted_meanwhile(
    application: Application, client: httpx2.AsyncClient, onnx: bytes
) -> None:
    uploading = asyncio.create_task(client.put(f"{M}/1?wait=120", content=onnx))
    await application.catalog.until(lambda: "m" in application.catalog.snapshot.models)
    assert (await client.delete("/admin/v1/models/m")).status_code == 204
    assert (await uploading).status_code == 201


async def test_wait_ends_when_nobody_waits_any_more(application: Application, onnx: bytes) -> None:
    exchange = Exchange(application.app, "PUT", f"{M}/1", "wait=600")
    exchange.feed(onnx)
    await application.catalog.until(lambda: "m" in application.catalog.snapshot.models)
    exchange.disconnect()
    assert await exchange.status() == 201
    assert list(application.repository.versions("m")) == [1]


async def test_an_upload_over_a_real_connection(application: Application, onnx: bytes) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for at in range(0, len(onnx), 1000):
            yield onnx[at : at + 1000]

    async with application.served() as url, httpx2.AsyncClient(base_url=url, timeout=120, headers=OPERATOR) as client:
        assert (await client.post(M, content=chunks())).json()["version"] == 1
        assert (await client.post(M, files={"model": ("m.onnx", onnx)})).json()["existing"] is True
        assert (await client.put(f"{M}/2", content=onnx)).status_code == 201
        assert (await client.put(f"{M}/2", content=onnx, params={"config": '{"rows_max": 2}'})).status_code == 409
