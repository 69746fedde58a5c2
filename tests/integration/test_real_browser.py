"""A real browser: the server's own pages work, and a page of another origin neither calls the server nor reads from it.

evil page (its own server) ─ fetch, form, image, beacon ─> gateway ─ what reached the infer handler is counted
         └─ its results ─> its own server ─> the test
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from millstream.gateway.app import build_app
from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.fast_path import ConnectionContext, fast_path_protocol
from millstream.gateway.http.operation import page_headers
from tests.kit.application import Application
from tests.kit.handlers import Echo
from tests.kit.tools import program
from tests.kit.wire import PATIENCE_S, Served, serving

pytestmark = [pytest.mark.anyio, pytest.mark.needs("chromium")]
INFER = "/v2/models/now/infer"
#: runs each attempt at TARGET, and sends what the page learnt to its own server
_SCRIPT = """
const target = "TARGET";
const infer = target + "/v2/models/now/infer";
const json = {"content-type": "application/json"};
const attempts = {
  read: () => fetch(target + "/v2").then(async reply => `${reply.status} ${await reply.text()}`),
  post: () => fetch(infer, {method: "POST", body: "{}"}).then(reply => `${reply.status}`),
  preflighted: () => fetch(infer, {method: "POST", body: "{}", headers: json}).then(reply => `${reply.status}`),
  blind: () => fetch(infer, {method: "POST", body: "{}", mode: "no-cors"}).then(reply => reply.type),
  beacon: async () => `${navigator.sendBeacon(infer, "{}")}`,
  form: () => new Promise(resolve => {
    const frame = document.createElement("iframe");
    frame.name = "frame";
    document.body.append(frame);
    const form = document.createElement("form");
    Object.assign(form, {method: "POST", action: infer, target: "frame", enctype: "text/plain"});
    document.body.append(form);
    frame.onload = () => resolve("sent");
    form.submit();
  }),
  image: () => new Promise(resolve => {
    const image = new Image();
    image.onerror = () => resolve("error");
    image.onload = () => resolve("loaded");
    image.src = target + "/v2/health/live";
  }),
};
(async () => {
  const results = {};
  for (const name of ATTEMPTS) {
    try { results[name] = await attempts[name](); } catch (error) { results[name] = error.name; }
  }
  await fetch("/results", {method: "POST", body: JSON.stringify(results)});
})();
"""
ALL = ["read", "post", "preflighted", "blind", "beacon", "form", "image"]


class Counting(Echo):
    """Counts the requests that it answers."""

    def __init__(self) -> None:
        self.calls = 0

    def submit(self, *arguments: Any, **options: Any) -> Any:
        self.calls += 1
        return super().submit(*arguments, **options)


class Page:
    """Routes of a page that makes attempts, and of its results."""

    def __init__(self) -> None:
        self.target = ""
        self.attempts = ALL
        self.results: asyncio.Future[dict[str, str]] = asyncio.get_running_loop().create_future()
        self.routes = [Route("/page", self._page), Route("/results", self._take, methods=["POST"])]

    async def _page(self, _: Request) -> Response:
        script = _SCRIPT.replace("TARGET", self.target, 1).replace("ATTEMPTS", orjson.dumps(self.attempts).decode())
        # The own pages of the server have this policy, too, and some browsers say "Origin: null" because of it.
        policy = {"referrer-policy": page_headers()["referrer-policy"]}
        return HTMLResponse(f"<!DOCTYPE html><title>page</title><body><script>{script}</script>", headers=policy)

    async def _take(self, request: Request) -> Response:
        self.results.set_result(orjson.loads(await request.body()))
        return Response(status_code=204)


@dataclasses.dataclass
class Gateway:
    """A gateway with the fast path, whose handler counts, and with a page of its own."""

    served: Served
    handler: Counting
    page: Page


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    application = Application(tmp_path / "home")
    handler, page = Counting(), Page()
    app = build_app(dataclasses.replace(application.app.state.deps, infer=handler))
    app.router.routes.extend(page.routes)
    context = ConnectionContext(browser_guard=application.browser_guard)
    lane = fast_path_protocol(handler, 4096, 100, ReceiveBudget(1 << 24), ReplyBudget(1 << 30), context=context)
    async with serving(app, lane) as served:
        yield Gateway(served, handler, page)


@asynccontextmanager
async def browsing(folder: Path, *arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a browser; the name evil.example resolves to this machine, as after a rebinding."""
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
    options += [f"--user-data-dir={folder}", "--host-resolver-rules=MAP evil.example 127.0.0.1"]
    quiet = asyncio.subprocess.DEVNULL
    browser = await asyncio.create_subprocess_exec(
        program("chromium"), *options, *arguments, stdin=quiet, stderr=quiet, stdout=asyncio.subprocess.PIPE
    )
    try:
        yield browser
    finally:
        if browser.returncode is None:
            browser.terminate()
        await browser.communicate()


async def dom(folder: Path, url: str) -> str:
    """Return the elements of a page after its scripts have run."""
    async with browsing(folder, "--dump-dom", "--virtual-time-budget=20000", url) as browser:
        out, _ = await asyncio.wait_for(browser.communicate(), 2 * PATIENCE_S)
        return out.decode()


async def results(folder: Path, page: Page, url: str) -> dict[str, str]:
    """Return what a page learnt."""
    async with browsing(folder, "--remote-debugging-port=0", url):
        return await asyncio.wait_for(page.results, 2 * PATIENCE_S)


async def test_the_servers_own_pages_work(gateway: Gateway, tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{gateway.served.port}"
    assert "<h2>Models</h2>" in await dom(tmp_path / "start", f"{url}/")
    assert "opblock" in await dom(tmp_path / "docs", f"{url}/docs")  # Swagger UI has read /openapi.json


async def test_a_page_of_the_server_may_call_it(gateway: Gateway, tmp_path: Path) -> None:
    gateway.page.attempts = ["read", "post", "preflighted", "beacon"]
    learnt = await results(tmp_path / "profile", gateway.page, f"http://127.0.0.1:{gateway.served.port}/page")
    assert learnt.pop("read").startswith("200 {")
    assert learnt == {"post": "200", "preflighted": "200", "beacon": "true"}
    assert gateway.handler.calls >= 2


@pytest.mark.parametrize("host", ["evil.example", "localhost", "127.0.0.1"])
async def test_a_page_of_another_origin_learns_and_changes_nothing(gateway: Gateway, tmp_path: Path, host: str) -> None:
    page = Page()
    page.target = f"http://127.0.0.1:{gateway.served.port}"
    async with serving(Starlette(routes=page.routes), "httptools") as evil:
        learnt = await results(tmp_path / "profile", page, f"http://{host}:{evil.port}/page")
    for name in ("read", "post", "preflighted"):
        assert learnt[name] == "TypeError", learnt
    assert learnt["image"] == "error"
    assert learnt["blind"] == "opaque"  # it was sent, and the page cannot know that it was refused
    assert gateway.handler.calls == 0


async def test_a_page_that_rebinds_its_name_is_not_answered(gateway: Gateway, tmp_path: Path) -> None:
    for path in ("/", "/v2", "/docs"):
        text = await dom(tmp_path / "profile", f"http://evil.example:{gateway.served.port}{path}")
        assert "is not known as a name of this server" in text
        assert "Models" not in text
