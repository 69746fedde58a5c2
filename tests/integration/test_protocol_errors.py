"""Every protocol says what went wrong in its own form, whatever it was: no path, no method, no worker, or our own
fault.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

from millstream.gateway.scheduling.caller import Caller
from millstream.services.errors import Code, Failure
from millstream.services.repository.endpoint_changes import activate_version
from millstream.services.wire.records import State
from tests.kit.application import Application
from tests.kit.catalog import instance, worker
from tests.kit.versions import publish

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def application(tmp_path: Path) -> Application:
    """Model m, whose one version is being loaded."""
    application = Application(tmp_path, request_bytes_max=4096)
    manifest = publish(application.repository, "m", 1)
    activate_version(application.repository, "m", 1)
    await application.catalog.set_workers(worker(instance(manifest, State.LOADING)))
    return application


@pytest.fixture
async def client(application: Application) -> AsyncIterator[httpx2.AsyncClient]:
    async with application.client() as client:
        yield client


def plain(reply: httpx2.Response, status: int) -> str:
    assert list(reply.json()) == ["error"]
    return str(reply.json()["error"])


def openai(reply: httpx2.Response, status: int) -> str:
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


def torchserve(reply: httpx2.Response, status: int) -> str:
    assert set(reply.json()) == {"code", "type", "message"}
    assert reply.json()["code"] == status
    return str(reply.json()["message"])


def sagemaker(reply: httpx2.Response, status: int) -> str:
    assert reply.headers["x-amzn-errortype"]
    return str(reply.json()["Message"])


Form = Callable[[httpx2.Response, int], str]
CALLS: list[tuple[str, Form]] = [
    ("/v1/models/m:predict", plain),
    ("/v1/models/m/versions/1:classify", plain),
    ("/v2/models/m/generate", plain),
    ("/invocations", plain),
    ("/v1/embeddings", openai),
    ("/openai/v1/embeddings", openai),
    ("/predictions/m", torchserve),
    ("/models/m/invoke", torchserve),
    ("/endpoints/m/invocations", sagemaker),
]
EMBED = {"model": "m", "input": [[1]], "instances": [[1, 2, 3, 4]], "x": [1, 2, 3, 4]}


@pytest.mark.parametrize(("path", "form"), CALLS)
async def test_no_worker_has_the_version(client: httpx2.AsyncClient, path: str, form: Form) -> None:
    reply = await client.post(path, json=EMBED)
    assert reply.status_code == 503
    assert form(reply, 503) == "no worker serves version 1 of 'm'"


@pytest.mark.parametrize(("path", "form"), CALLS)
async def test_another_method(client: httpx2.AsyncClient, path: str, form: Form) -> None:
    reply = await client.patch(path)
    assert (reply.status_code, form(reply, 405)) == (405, "Method Not Allowed")
    assert "POST" in reply.headers["allow"]


@pytest.mark.parametrize(
    ("path", "form"),
    [
        ("/v1/models/m/nope", plain),
        ("/v1/nope", openai),
        ("/predictions/a/b/c", torchserve),
        ("/models/a/b/c/d", torchserve),
        ("/nope", plain),
    ],
)
async def test_no_such_path(client: httpx2.AsyncClient, path: str, form: Form) -> None:
    reply = await client.post(path)
    assert (reply.status_code, form(reply, 404).partition(";")[0]) == (404, "Not Found")


async def test_no_such_path_below_an_endpoint(client: httpx2.AsyncClient) -> None:
    reply = await client.post("/endpoints/m/nope")
    assert (reply.status_code, sagemaker(reply, 400).partition(";")[0]) == (400, "Not Found")
    assert reply.headers["x-amzn-errortype"] == "ValidationError"


@pytest.mark.parametrize(("path", "form"), CALLS)
async def test_our_own_fault(
    application: Application,
    client: httpx2.AsyncClient,
    path: str,
    form: Form,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*_: object) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(Caller, "find", broken)
    reply = await client.post(path, json=EMBED)
    assert reply.status_code == 500
    text, _, error_id = form(reply, 500).rpartition(" ")
    assert text == "internal error"
    assert error_id in caplog.text


async def test_a_version_that_is_not_ready_is_no_error_of_the_client(client: httpx2.AsyncClient) -> None:
    reply = await client.get("/v1/models/m")
    assert reply.status_code == 503
    assert reply.json()["ready"] is False
    assert reply.json()["model_version_status"][0]["state"] == "LOADING"
    assert (await client.get("/v1/models/m/metadata")).status_code == 200


async def test_ping_while_nothing_answers(application: Application, client: httpx2.AsyncClient) -> None:
    application.ready = False
    reply = await client.get("/ping")
    assert (reply.status_code, reply.json()) == (503, {"status": "Unhealthy"})


async def test_bodies_that_are_too_large(client: httpx2.AsyncClient) -> None:
    reply = await client.post("/v1/embeddings", content=b" " * 5000)
    assert (reply.status_code, openai(reply, 413)) == (413, "the request body is larger than the limit of 4096 bytes")


async def test_management_is_for_those_who_may(application: Application) -> None:
    async with application.client(operator=False) as stranger:
        for method, path in (("DELETE", "/models/m"), ("POST", "/models")):
            reply = await stranger.request(method, path)
            assert reply.status_code == 401
            torchserve(reply, 401)


@pytest.mark.parametrize(
    ("path", "type_"),
    [
        ("/predictions/nope", "ModelNotFoundException"),
        ("/predictions/version-nope", "ModelNotFoundException"),  # the name of a model does not decide the type
        ("/predictions/m/7", "ModelVersionNotFoundException"),
        ("/predictions/m/abc", "ModelVersionNotFoundException"),
        ("/models/nope/invoke", "ResourceNotFoundException"),
        ("/predictions/m/1/more", "ResourceNotFoundException"),
    ],
)
async def test_torchserve_says_what_was_not_found(client: httpx2.AsyncClient, path: str, type_: str) -> None:
    reply = await client.post(path, json=EMBED)
    assert (reply.status_code, reply.json()["type"]) == (404, type_)


@pytest.mark.parametrize(("model", "code"), [("nope", "model_not_found"), ("m:7", "model_not_found"), ("m:abc", None)])
async def test_openai_says_that_the_model_was_not_found(
    client: httpx2.AsyncClient, model: str, code: str | None
) -> None:
    reply = await client.post("/v1/embeddings", json={"model": model, "input": [[1]]})
    assert reply.status_code == 404
    assert (reply.json()["error"]["code"], reply.json()["error"]["param"]) == (code, code and "model")


@pytest.mark.parametrize(("seconds", "header"), [(0.0, "1"), (0.2, "1"), (2.5, "3")])
async def test_retry_after_is_at_least_a_second(
    application: Application,
    client: httpx2.AsyncClient,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
    header: str,
) -> None:
    def full(*_: object) -> Any:
        raise Failure(Code.OVERLOADED, "the lane is full", retry_after_s=seconds)

    monkeypatch.setattr(Caller, "find", full)
    reply = await client.post("/predictions/m", json=EMBED)
    assert (reply.status_code, reply.headers["retry-after"]) == (429, header)
