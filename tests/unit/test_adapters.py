"""A protocol is one Adapter record: its routes, their section of the OpenAPI page, who may call them, and its
errors.
"""

from __future__ import annotations

from pathlib import Path

import httpx2
import orjson
import pytest
from fastapi import APIRouter, FastAPI
from pydantic import BaseModel

from millstream.gateway import app as application
from millstream.gateway.http.adapter import Adapter, Routes, Tag, versioned
from millstream.gateway.http.errors import ErrorFormat, FormattedError, documented
from millstream.services.access.scopes import Need, Row
from millstream.services.errors import Failure, invalid
from tests.kit.application import Application

pytestmark = pytest.mark.anyio


class EchoError(BaseModel):
    """The errors of a protocol that only this test speaks."""

    oops: str


def _write(error: Failure, status: int) -> FormattedError:
    return FormattedError(status, {"x-echo": error.code}, orjson.dumps({"oops": error.message}))


def echo_adapter() -> Adapter:
    open_to_all, protected = APIRouter(), APIRouter()

    @open_to_all.get("/echo/{word}", responses=documented(400))
    async def echo(word: str) -> dict[str, str]:
        if word == "bad":
            raise invalid("a bad word")
        return {"echo": word}

    @protected.delete("/echo/{word}")
    async def forget(word: str) -> None:
        raise AssertionError(word)

    tag = Tag("echo", "Says what it hears.")
    return Adapter(
        routes=(Routes(open_to_all, tag), Routes(protected, tag, keyed=True)),
        access={
            ("GET", "/echo/{word}"): Row(Need.READ),
            ("DELETE", "/echo/{word}"): Row(Need.READ, changes=True),
        },
        error_format=ErrorFormat(_write, EchoError),
        error_paths=("/echo",),
    )


async def test_a_protocol_is_added_by_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "CORE", (*application.CORE, echo_adapter()))
    parts = Application(tmp_path)
    async with parts.client(operator=False) as client:
        assert (await client.get("/echo/hello")).json() == {"echo": "hello"}
        for method, path, status, message in (
            ("GET", "/echo/bad", 400, "a bad word"),
            ("DELETE", "/echo/hello", 401, "send a key"),
            ("GET", "/echo", 404, "Not Found"),
            ("PUT", "/echo/hello", 405, "Method Not Allowed"),
        ):
            reply = await client.request(method, path)
            assert (reply.status_code, message in reply.json()["oops"]) == (status, True)
            assert "x-echo" in reply.headers
        document = (await client.get("/openapi.json")).json()
    assert {"name": "echo", "description": "Says what it hears.", "x-open": False} in document["tags"]
    operations = document["paths"]["/echo/{word}"]
    assert operations["get"]["tags"] == operations["delete"]["tags"] == ["echo"]
    assert set(operations["get"]["responses"]) == {"200", "400"}
    assert set(operations["delete"]["responses"]) == {"200", "401", "403"}
    assert operations["get"]["responses"]["400"] == {"$ref": "#/components/responses/EchoError400"}
    error = document["components"]["responses"]["EchoError400"]
    assert error["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/EchoError"}
    assert set(document["components"]["schemas"]["EchoError"]["properties"]) == {"oops"}


def test_no_two_adapters_claim_the_errors_of_one_prefix() -> None:
    prefixes = [prefix for adapter in application.adapters() for prefix in adapter.error_paths]
    assert len(prefixes) == len(set(prefixes))


async def test_a_versioned_call_has_two_paths_and_one_handler() -> None:
    router = APIRouter()

    @versioned(router, "GET", "/m/{model}[/versions/{version}]/say", ("of the serving version", "of one version"))
    async def say(model: str, version: str | None) -> list[str | None]:
        return [model, version]

    app = FastAPI()
    app.include_router(router)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1") as client:
        assert (await client.get("/m/a/say")).json() == ["a", None]
        assert (await client.get("/m/a/say?version=3")).json() == ["a", None]  # the path alone names a version
        assert (await client.get("/m/a/versions/3/say")).json() == ["a", "3"]
    paths = app.openapi()["paths"]
    assert [paths[path]["get"]["summary"] for path in ("/m/{model}/say", "/m/{model}/versions/{version}/say")] == [
        "of the serving version",
        "of one version",
    ]
    parameters = paths["/m/{model}/versions/{version}/say"]["get"]["parameters"]
    assert [(one["name"], one["schema"]["type"]) for one in parameters] == [("model", "string"), ("version", "string")]
