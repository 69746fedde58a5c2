"""The v2 paths that answer from the catalog, and the ASGI form of infer, over a real repository."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from millstream.gateway.connection.infer_handler import HttpReply, InferHeaders, reply_headers
from millstream.services.repository.endpoint_changes import activate_version
from millstream.services.wire.records import State
from tests.kit.application import Application, Exchange
from tests.kit.catalog import instance, worker
from tests.kit.versions import publish

pytestmark = pytest.mark.anyio
NOT_FOUND = {"error": "Not Found"}
REPLY = HttpReply(200, reply_headers((b"content-type", b"application/json"), (b"x-more", b"1")), b'{"outputs":[]}')


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def application(tmp_path: Path) -> Application:
    """Model m: version 1 ready and active, 2 loading, 3 failed. Model idle: a version, none active."""
    application = Application(tmp_path, request_bytes_max=4096)
    one, two, three = (publish(application.repository, "m", number) for number in (1, 2, 3))
    publish(application.repository, "idle", 1)
    activate_version(application.repository, "m", 1)
    await application.catalog.set_workers(
        worker(instance(one), instance(two, State.LOADING), instance(three, State.FAILED, "no such operator"))
    )
    return application


@pytest.fixture
async def client(application: Application) -> AsyncIterator[httpx2.AsyncClient]:
    async with application.client() as client:
        yield client


async def test_the_server_describes_itself_with_and_without_a_slash(client: httpx2.AsyncClient) -> None:
    plain, slashed = await client.get("/v2"), await client.get("/v2/")
    assert plain.status_code == slashed.status_code == 200
    assert plain.json() == slashed.json()
    assert plain.json()["version"] == "1.2.3"


async def test_live_and_ready(application: Application, client: httpx2.AsyncClient) -> None:
    assert (await client.get("/v2/health/live")).json() == {"live": True}
    assert (await client.get("/v2/health/ready")).json() == {"ready": True}
    application.ready = False
    reply = await client.get("/v2/health/ready")
    assert reply.status_code == 503
    assert reply.json()["ready"] is False
    assert "not ready" in reply.json()["error"]
    assert (await client.get("/v2/health/live")).status_code == 200


async def test_models_lists_those_that_answer(client: httpx2.AsyncClient) -> None:
    assert (await client.get("/v2/models")).json() == {"models": ["m"]}


@pytest.mark.parametrize(
    "path", ["/v2/models/m", "/v2/models/m/versions/1", "/v2/models/m/versions/01", "/v2/models/%6d"]
)
async def test_metadata_gives_the_signature_and_the_versions_served(client: httpx2.AsyncClient, path: str) -> None:
    document = (await client.get(path)).json()
    assert document["name"] == "m"
    assert document["versions"] == ["1"]
    assert document["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}]
    assert document["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [-1, 2]}]


@pytest.mark.parametrize("suffix", ["", "/ready"])
@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("nope", "Request for unknown model: 'nope' is not found"),
        ("n%20ope", "Request for unknown model: 'n ope' is not found"),
        ("m/versions/7", "Request for unknown model: 'm' version 7 is not found; it has versions 3, 2 and 1"),
        ("m/versions/0", "Request for unknown model: 'm' version 0 is not found; it has versions 3, 2 and 1"),
        ("idle", "Request for unknown model: 'idle' has no active version; it has version 1"),
        ("m/versions/one", "Not Found; a version is a whole number, not 'one'"),
        ("m/versions/-1", "Not Found; a version is a whole number, not '-1'"),
        ("m/versions/%C2%B2", "Not Found; a version is a whole number, not '²'"),
        ("m/versions/" + "9" * 5000, "Request for unknown model: 'm' version 9999999999… is not found"),
    ],
)
async def test_unknown_models_and_versions(client: httpx2.AsyncClient, path: str, error: str, suffix: str) -> None:
    reply = await client.get(f"/v2/models/{path}{suffix}")
    assert (reply.status_code, reply.json()) == (404, {"error": error})


async def test_model_readiness(client: httpx2.AsyncClient) -> None:
    for path in ("m", "m/versions/1"):
        reply = await client.get(f"/v2/models/{path}/ready")
        assert (reply.status_code, reply.json()) == (200, {"name": "m", "ready": True})
    for version, why in ((2, "loading"), (3, "failed: no such operator")):
        reply = await client.get(f"/v2/models/m/versions/{version}/ready")
        assert reply.status_code == 503
        assert reply.json() == {
            "name": "m",
            "ready": False,
            "error": f"model 'm' version {version} is not ready: {why}",
        }


@pytest.mark.parametrize(
    ("path", "version"), [("/v2/models/a%20b/infer", None), ("/v2/models/a%20b/versions/7/infer", "7")]
)
async def test_infer_hands_on_the_request_and_writes_the_reply(
    application: Application, client: httpx2.AsyncClient, path: str, version: str | None
) -> None:
    headers = {"Inference-Header-Content-Length": "3", "Content-Encoding": "gzip", "Accept-Encoding": "deflate"}
    posted = asyncio.create_task(client.post(path, content=b"abcdef", headers=headers))
    submission = await application.inbox.next()
    assert (submission.model, submission.version, submission.body) == ("a b", version, b"abcdef")
    assert submission.headers == InferHeaders(b"gzip", b"deflate", b"3", credential=submission.headers.credential)
    submission.done(REPLY)
    reply = await posted
    assert (reply.status_code, reply.content) == (200, REPLY.body)
    assert reply.headers["x-more"] == "1"
    assert reply.headers["content-length"] == str(len(REPLY.body))
    assert not submission.cancelled.is_set()


async def test_infer_without_the_optional_headers(application: Application) -> None:
    exchange = Exchange(application.app, "POST", "/v2/models/m/infer", "test_1=1&test_2=2")
    exchange.feed(b"{}")
    submission = await application.inbox.next()
    assert submission.headers == InferHeaders(None, None, None, credential=submission.headers.credential)
    submission.done(HttpReply(503, reply_headers(), b""))
    assert await exchange.status() == 503


async def test_a_body_over_the_limit_is_refused_unread(application: Application) -> None:
    # nothing is fed: an application that waits for the body never ends
    for length in ("4097", "9" * 5000):
        exchange = Exchange(application.app, "POST", "/v2/models/m/infer", headers={"content-length": length})
        assert await exchange.status() == 413


async def test_a_chunked_body_over_the_limit_is_refused_while_it_comes(
    application: Application, client: httpx2.AsyncClient
) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"x" * 1000

    reply = await client.post("/v2/models/m/infer", content=endless())
    assert reply.status_code == 413
    assert reply.json() == {"error": "the request body is larger than the limit of 4096 bytes"}
    assert application.inbox.empty


async def test_a_chunked_body_is_put_together(application: Application) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b"x" * 1024

    async with application.served() as url, httpx2.AsyncClient(timeout=120) as client:
        posted = asyncio.create_task(client.post(f"{url}/v2/models/m/infer", content=chunks()))
        submission = await application.inbox.next()
        assert submission.body == b"x" * 4096
        submission.done(REPLY)
        assert (await posted).content == REPLY.body


async def test_a_client_that_goes_away_cancels_its_request(application: Application) -> None:
    async with application.served() as url:
        host, _, port = url.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        submission = await application.inbox.next()
        writer.close()
        await asyncio.wait_for(submission.cancelled.wait(), 120)


async def test_every_error_is_json_and_405_names_all_methods(client: httpx2.AsyncClient) -> None:
    for method, path, status, error in (
        ("GET", "/nowhere", 404, "Not Found"),
        ("GET", "/v2/models/", 404, "Not Found; the path has no model name"),
        ("GET", "/v2/models/m/ready/", 404, "Not Found; the path ends with a slash: leave it out"),
        ("POST", "/v2/models/m", 405, "Method Not Allowed"),
        ("GET", "/v2/models/m/infer", 405, "Method Not Allowed"),
        ("BREW", "/v2", 405, "Method Not Allowed"),
    ):
        reply = await client.request(method, path)
        assert (reply.status_code, reply.json()) == (status, {"error": error})
        assert reply.headers["content-type"] == "application/json"
        assert ("allow" in reply.headers) == (status == 405)
    assert (await client.put("/v2")).headers["allow"] == "GET, HEAD"
    assert (await client.put("/v2/models/m/infer")).headers["allow"] == "POST"
    reply = await client.patch("/admin/v1/models/m/versions/1")
    assert reply.headers["allow"] == "GET, PUT, DELETE, HEAD"


async def test_head_is_get_without_the_body(application: Application) -> None:
    async with application.served() as url, httpx2.AsyncClient(base_url=url, timeout=120) as client:
        for path in ("/v2", "/v2/health/live", "/v2/models/m", "/metrics"):
            got, asked = await client.get(path), await client.head(path)
            assert (asked.status_code, asked.content) == (200, b"")
            assert asked.headers["content-length"] == got.headers["content-length"]
        assert (await client.head("/v2/models/nope")).status_code == 404


async def test_an_unexpected_error_is_a_500_with_an_id_that_is_in_the_log(
    application: Application, client: httpx2.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> bool:
        raise ZeroDivisionError

    application.is_ready = broken
    reply = await client.get("/v2/health/ready")
    assert reply.status_code == 500
    text, _, error_id = reply.json()["error"].rpartition(" ")
    assert text == "internal error"
    assert error_id in caplog.text
    assert "ZeroDivisionError" in caplog.text


async def test_metrics_passes_what_is_accepted(application: Application, client: httpx2.AsyncClient) -> None:
    reply = await client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
    assert (reply.status_code, reply.content) == (200, b"up 1\n")
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert application.accepts == ["application/openmetrics-text"]


async def test_the_lifespan_starts_and_stops(application: Application) -> None:
    async with application.app.router.lifespan_context(application.app):
        assert application.events == ["start"]
    assert application.events == ["start", "stop"]


async def test_the_docs_page_needs_no_other_host(client: httpx2.AsyncClient) -> None:
    page = (await client.get("/docs")).text
    assert "https://" not in page
    for name in ("swagger-ui-bundle.js", "swagger-ui.css", "page.js", "page.css"):
        assert f'"docs/assets/{name}"' in page
        assert (await client.get(f"/docs/assets/{name}")).status_code == 200
    assert (await client.get("/docs/assets/core.py")).json() == NOT_FOUND


async def test_the_openapi_document_says_what_is_answered(client: httpx2.AsyncClient) -> None:
    paths = (await client.get("/openapi.json")).json()["paths"]
    operations = [operation for path in paths.values() for operation in path.values()]
    assert len(operations) >= 20
    for operation in operations:
        assert operation["tags"]
        assert operation["summary"]
        assert "422" not in operation["responses"]
    assert {"400", "403", "409", "413", "503"} <= set(
        paths["/admin/v1/models/{name}/versions/{version}"]["put"]["responses"]
    )
    assert paths["/admin/v1/pools"]["get"]["security"] == [{"key": []}]
