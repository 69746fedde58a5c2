"""GET /: JSON. The page of the HTTP API loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path

import httpx2
import pytest

from millstream.services.repository.endpoint_changes import activate_version
from tests.kit.application import Application
from tests.kit.catalog import instance, worker
from tests.kit.versions import publish

pytestmark = pytest.mark.anyio
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"
ALIVE = {"status": "alive"}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
async def application(tmp_path: Path) -> Application:
    application = Application(tmp_path, allowed_hosts="*")
    manifest = publish(application.repository, "m", 1)
    activate_version(application.repository, "m", 1)
    await application.catalog.set_workers(worker(instance(manifest)))
    return application


@pytest.fixture
async def client(application: Application) -> AsyncIterator[httpx2.AsyncClient]:
    async with application.client() as client:
        yield client


class Page(HTMLParser):
    """The elements and the addresses of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in {"href", "src", "action"}]
        assert not any(name.startswith("on") or name == "style" for name, _ in attrs)


async def test_clients_of_the_api_get_json(client: httpx2.AsyncClient) -> None:
    for accept in ("*/*", "application/json"):
        reply = await client.get("/", headers={"accept": accept})
        assert (reply.status_code, reply.json()) == (200, ALIVE)
        assert reply.headers["vary"] == "Accept"


async def test_a_browser_may_load_nothing_from_elsewhere(client: httpx2.AsyncClient) -> None:
    reply = await client.get("/docs", headers={"accept": BROWSER})
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    allowed = {source for sources in policy.values() for source in sources.split()}
    assert all(source in {"'none'", "'self'", "data:", "'unsafe-inline'"} or "sha256" in source for source in allowed)
    assert "unsafe" not in policy.get("script-src", "")
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "http" not in "".join(
        address for address in Page(reply.text).addresses if not address.startswith("data:image/svg+xml")
    )
