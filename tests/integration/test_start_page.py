"""GET /: a page for a browser, JSON for other clients. It loads nothing from elsewhere and escapes every name."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import AsyncIterator
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import urljoin

import httpx2
import pytest

from millstream.gateway.catalog.snapshot import Snapshot
from millstream.gateway.http.start_page import MODELS_MAX, prefers_html, start_page
from millstream.services.repository.activation import activate_version
from tests.kit import models
from tests.kit.application import Application
from tests.kit.catalog import instance, worker
from tests.kit.stack import running_stack
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
    assert {"docs", "metrics", "openapi.json", "v2/models", "v2/models/m", "v2/health/ready"} <= set(links)
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


async def test_names_are_escaped(application: Application) -> None:
    snapshot = application.catalog.snapshot
    view = snapshot.models["m"]
    name = "<script>alert(1)</script>\"'&"
    manifest = view.versions[1].manifest.model_copy(update={"model": name})
    hostile = Snapshot(
        models={name: replace(view, name=name, versions={1: replace(view.versions[1], manifest=manifest)})}, workers=()
    )
    page = Page(start_page("<b>", hostile, "http://<i>", ready=True, key=True))
    assert not {"script", "b", "i"} & set(page.elements)
    assert any("%3Cscript%3E" in address for address in page.addresses)


async def test_a_host_that_is_none_is_not_repeated(client: httpx2.AsyncClient) -> None:
    reply = await client.get("/", headers={"accept": "text/html", "host": "evil';rm -rf /;'"})
    assert reply.status_code == 200
    assert "rm -rf" not in reply.text
    reply = await client.get("/", headers={"accept": "text/html", "host": "models.example:8443"})
    assert "curl -s http://models.example:8443/v2/models/m<" in reply.text


async def test_many_models_are_counted(application: Application) -> None:
    view = application.catalog.snapshot.models["m"]
    many = {f"m{at:05}": replace(view, name=f"m{at:05}") for at in range(5000)}
    text = start_page("1", Snapshot(models=many, workers=()), "http://a", ready=False, key=False)
    assert text.count("<tr>") == MODELS_MAX + 1
    assert f"{5000 - MODELS_MAX} more models" in text
    assert "Not ready" in text
    empty = start_page("1", Snapshot(models={}, workers=()), "http://a", ready=True, key=False)
    assert "No model is loaded yet" in empty


@pytest.mark.needs("curl")
def test_the_commands_of_the_page_work_as_they_are(tmp_path: Path) -> None:
    with running_stack(tmp_path) as stack:
        stack.push("digits", models.mlp(tmp_path / "m.onnx"))
        text = stack.http.get("/", headers={"accept": BROWSER}).text
        commands = [unescape(found) for found in re.findall("<code>(.*?)</code>", text, re.DOTALL)]
        infer = next(command for command in commands if "/infer" in command)
        done = subprocess.run(["sh", "-c", infer], capture_output=True, text=True, timeout=300, check=True)
        assert json.loads(done.stdout)["model_name"] == "digits"
        upload = next(command for command in commands if "-T model.onnx" in command)
        models.mlp(tmp_path / "model.onnx")
        (tmp_path / ".millstream").symlink_to(stack.home)
        done = subprocess.run(
            ["sh", "-c", upload], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
        )
        assert json.loads(done.stdout)["state"] == "ready"
        assert stack.http.get("/").json() == ALIVE
        assert stack.http.head("/", headers={"accept": BROWSER}).headers["content-type"].startswith("text/html")
