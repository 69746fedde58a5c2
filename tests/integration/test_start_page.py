"""GET /: a page for a browser, JSON for other clients. It loads nothing from elsewhere, and names no model."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin

import httpx2
import pytest

from millstream.gateway.http.operation import prefers_html
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


@pytest.mark.parametrize(
    ("accept", "html"),
    [
        (BROWSER, True),
        ("text/html", True),
        ("TEXT/HTML;Q=0.5", True),
        ("application/json, text/html;q=0.9", False),
        ("application/json;q=0.5,text/html;q=0.5", True),
        ("text/html;q=0", False),
        ("text/html;q=zero", False),
        ("*/*", False),
        ("text/*", False),
        ("application/json", False),
        ("", False),
        (",;,;q=", False),
        (None, False),
    ],
)
def test_who_gets_the_page(accept: str | None, html: bool) -> None:
    assert prefers_html(accept) is html


async def test_clients_of_the_api_get_json(client: httpx2.AsyncClient) -> None:
    for accept in ("*/*", "application/json"):
        reply = await client.get("/", headers={"accept": accept})
        assert (reply.status_code, reply.json()) == (200, ALIVE)
        assert reply.headers["vary"] == "Accept"


async def test_every_link_of_the_page_works_and_stays_here(client: httpx2.AsyncClient) -> None:
    reply = await client.get("/", headers={"accept": BROWSER})
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    page = Page(reply.text)
    links = [address for address in page.addresses if not address.startswith("data:")]
    assert {"docs", "docs/assets/page.css", "metrics", "openapi.json", "v2/models", "v2/health/ready"} <= set(links)
    for link in links:
        assert not re.match("[a-z]+:|//", link)
        assert (await client.get(urljoin("/", link))).status_code == 200
    assert not {"script", "img", "iframe", "form"} & set(page.elements)
    assert "1.2.3" in reply.text


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_a_browser_may_load_nothing_from_elsewhere(client: httpx2.AsyncClient, path: str) -> None:
    reply = await client.get(path, headers={"accept": BROWSER})
    policy = dict(part.split(" ", 1) for part in reply.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == policy["form-action"] == "'none'"
    allowed = {source for sources in policy.values() for source in sources.split()}
    assert all(source in {"'none'", "'self'", "data:", "'unsafe-inline'"} or "sha256" in source for source in allowed)
    assert "unsafe" not in policy.get("script-src", "")
    assert reply.headers["x-content-type-options"] == "nosniff"
    assert "http" not in "".join(
        address for address in Page(reply.text).addresses if not address.startswith("data:image/svg+xml")
    )
