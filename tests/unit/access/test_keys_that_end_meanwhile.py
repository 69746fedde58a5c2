"""A call that was let in changes nothing once its key is revoked or changed, however long its body or work takes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2
import pytest

from millstream.services.ingest.check_process import examine
from tests.kit import models
from tests.kit.access_rows import HTTP, url_of
from tests.kit.application import Application, Exchange

pytestmark = pytest.mark.anyio

WITH_BODIES = [(method, path) for (method, path), row in HTTP.items() if row.changes and method != "DELETE"]
M = "/admin/v1/models/m/versions"


async def key(client: httpx2.AsyncClient, name: str, *scopes: str) -> dict[str, str]:
    made = await client.post("/admin/v1/keys", json={"name": name, "scopes": scopes})
    return {"authorization": f"Bearer {made.json()['key']}"}


async def begun(application: Application, method: str, path: str, headers: dict[str, str]) -> Exchange:
    """Return a request that has read the beginning of its body, or has been answered without it."""
    exchange = Exchange(application.app, method, path, headers=headers)
    exchange.feed(b"{", more=True)
    while not (exchange._fed.empty() or exchange.task.done()):
        await asyncio.sleep(0)
    return exchange


async def test_no_route_changes_anything_for_a_key_that_was_revoked_before_its_body_ended(tmp_path: Path) -> None:
    application = Application(tmp_path)
    waited = []
    async with application.client() as client:
        for number, (method, path) in enumerate(WITH_BODIES):
            headers = await key(client, f"key-{number}", "admin")
            exchange = await begun(application, method, url_of(path, "m"), headers)
            if exchange.task.done():  # it reads no body
                continue
            waited.append((method, path))
            await client.delete(f"/admin/v1/keys/key-{number}")
            exchange.feed(b"}")
            assert await exchange.status() == 401, (method, path)
    assert ("POST", "/admin/v1/keys") in waited
    assert ("POST", "/admin/v1/models/{name}/versions") in waited


async def test_a_scope_that_was_taken_before_the_body_ended_is_missed(tmp_path: Path) -> None:
    application = Application(tmp_path)
    async with application.client() as client:
        exchange = await begun(application, "POST", M, await key(client, "team", "models:write:m"))
        await client.patch("/admin/v1/keys/team", json={"scopes": ["models:read:m"]})
        exchange.feed(b"}")
        assert await exchange.status() == 403


async def test_an_upload_whose_key_is_revoked_during_its_check_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    application = Application(tmp_path / "home")
    async with application.client() as client:
        headers = await key(client, "team", "models:write:m")

        async def revoked(*arguments: Any) -> Any:
            await asyncio.create_task(client.delete("/admin/v1/keys/team"))  # in a context of its own
            return await examine(*arguments)

        monkeypatch.setattr("millstream.services.ingest.upload.examine", revoked)
        content = models.scale(tmp_path / "m.onnx").read_bytes()
        assert (await client.post(M, content=content, headers=headers)).status_code == 401
    assert list(application.repository.models()) == []
