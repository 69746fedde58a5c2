"""What web pages of other origins have a browser send is refused on every path, before anything happens.

Each request is sent to a server with the fast path and to one without, as bytes: clients would add headers.
"""

from __future__ import annotations

import dataclasses
import re
import socket
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any

import orjson
import pytest

from millstream.gateway.app import build_app
from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.fast_path import ConnectionContext, fast_path_protocol
from millstream.plugins.compat.sagemaker.settings import is_multi_model
from tests.kit.application import Application
from tests.kit.asgi_protocol import asgi_protocol
from tests.kit.handlers import Echo
from tests.kit.stack import running_stack
from tests.kit.wire import Wire, WireReply, serving

pytestmark = pytest.mark.anyio
PATH = "/v2/models/m/infer"
EVIL = "http://evil.example"
REFUSED = b"web pages of another origin"
STRANGE = b"is not known as a name of this server"
ADMIN = "the-admin-key"
#: headers after Host: what a browser sends for a page of another origin
PAGES = {
    "of another origin": (f"Origin: {EVIL}",),
    "without an origin": ("Origin: null",),
    "that loads an image": ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: image"),
    "of the same site": ("Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: cors", "Sec-Fetch-Dest: empty"),
}
#: paths that no route has
UNKNOWN = [("GET", "/nothing"), ("POST", "/v2/models"), ("PROPFIND", "/"), ("OPTIONS", PATH), ("GET", "/v2/models/m/")]


@dataclasses.dataclass
class Servers:
    """One application, the ports of its two servers, and the paths of its routes."""

    application: Application
    ports: dict[str, int]
    routes: list[tuple[str, str]]


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module", params=[False, True], ids=["torchserve", "sagemaker"])
async def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Servers]:
    application = Application(
        tmp_path_factory.mktemp("home"),
        admin_key=ADMIN,
        sagemaker_multi_model=request.param,
        vertex_health_route="/vertex/health",
        vertex_predict_route="/vertex/predict",
        allowed_hosts="models.example",
    )
    echo = Echo()
    app = build_app(dataclasses.replace(application.app.state.deps, infer=echo))
    context = ConnectionContext(gate=application.gate, browser_guard=application.browser_guard)
    lane = fast_path_protocol(echo, 4096, 100, ReceiveBudget(1 << 24), ReplyBudget(1 << 30), context=context)
    async with serving(app, lane) as fast, serving(app, asgi_protocol(Drain(), 100)) as plain:
        yield Servers(application, {"fast path": fast.port, "plain": plain.port}, paths_of(app.router))


def paths_of(router: Any) -> list[tuple[str, str]]:
    """Return method and path of all routes, also of routers that one includes."""
    found: list[tuple[str, str]] = []
    for route in router.routes:
        inner = getattr(route, "original_router", None)
        if inner is not None:
            found += paths_of(inner)
        else:
            path = re.sub(r"{[^}]*}", "1", route.path_format)
            found += [(method, path) for method in sorted(route.methods)]
    return found


def raw(method: str, path: str, *headers: str, host: str | None = "localhost", version: str = "1.1") -> bytes:
    body = b"{}" if method in {"POST", "PUT", "PATCH"} else b""
    hosts = [] if host is None else [f"Host: {host}"]
    lines = [f"{method} {path} HTTP/{version}", *hosts, f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


async def asked(port: int, *requests: bytes) -> list[WireReply]:
    """Return the replies to requests of one connection, each sent after the reply to the one before."""
    replies = []
    async with await Wire.connect(port) as wire:
        for request in requests:
            await wire.send(request)
            replies.append(await wire.reply(head=request.startswith(b"HEAD ")))
    return replies


@pytest.mark.parametrize("server", ["fast path", "plain"])
@pytest.mark.parametrize("page", PAGES)
async def test_no_route_answers_a_page_of_another_origin(servers: Servers, server: str, page: str) -> None:
    calls = [*servers.routes, *UNKNOWN]
    assert len(calls) > 100
    assert {("POST", "/v2/models/1/infer"), ("POST", "/invocations"), ("GET", "/ping"), ("GET", "/")} <= set(calls)
    replies = await asked(servers.ports[server], *(raw(*call, *PAGES[page]) for call in calls))
    for call, reply in zip(calls, replies, strict=True):
        assert reply.status == 403, call
        assert REFUSED in reply.body, call


@pytest.mark.parametrize("server", ["fast path", "plain"])
async def test_no_route_answers_a_page_that_rebinds_its_name(servers: Servers, server: str) -> None:
    calls = [*servers.routes, *UNKNOWN]
    for host, origin in product(("evil.example", "EVIL.example.:8000"), ((), ("Sec-Fetch-Site: same-origin",))):
        replies = await asked(servers.ports[server], *(raw(*call, *origin, host=host) for call in calls))
        for call, reply in zip(calls, replies, strict=True):
            assert (reply.status, STRANGE in reply.body) == (403, True), call


@pytest.mark.parametrize("server", ["fast path", "plain"])
async def test_every_route_answers_its_own_pages_and_programs(servers: Servers, server: str) -> None:
    port = servers.ports[server]
    own = (f"Origin: http://localhost:{port}", "Sec-Fetch-Site: same-origin")
    for headers, host in ((own, f"localhost:{port}"), ((), "models.example"), ((), "gateway"), ((), "[::1]")):
        replies = await asked(port, *(raw(*call, *headers, host=host) for call in servers.routes))
        for call, reply in zip(servers.routes, replies, strict=True):
            assert REFUSED not in reply.body, call
            assert STRANGE not in reply.body, call


SHAPES = {
    PATH: lambda document: document["error"],
    "/v1/models/m:predict": lambda document: document["error"],
    "/v1/embeddings": lambda document: document["error"]["message"],
    "/predictions/m": lambda document: document["message"],
    "/endpoints/m/invocations": lambda document: document["Message"],
    "/admin/v1/models": lambda document: document["error"],
    "/nothing": lambda document: document["error"],
}


@pytest.mark.parametrize("path", SHAPES)
async def test_a_refusal_has_the_form_of_its_protocol(servers: Servers, path: str) -> None:
    for port in servers.ports.values():
        [reply] = await asked(port, raw("POST", path, f"Origin: {EVIL}"))
        assert REFUSED.decode() in SHAPES[path](orjson.loads(reply.body))
        assert EVIL in reply.body.decode()


@pytest.mark.parametrize("server", ["fast path", "plain"])
async def test_a_repeated_head_is_refused_each_time(servers: Servers, server: str) -> None:
    port = servers.ports[server]
    own, page, strange = raw("POST", PATH), raw("POST", PATH, f"Origin: {EVIL}"), raw("POST", PATH, host="evil.example")
    sent = [page] * 4 + [own] * 4 + [strange] * 4 + [own] * 2 + [page, strange] * 2
    statuses = [reply.status for reply in await asked(port, *sent)]
    assert statuses == [403] * 4 + [200] * 4 + [403] * 4 + [200] * 2 + [403] * 4


@pytest.mark.parametrize("server", ["fast path", "plain"])
async def test_a_right_key_is_no_pages_and_keys_make_the_host_free(servers: Servers, server: str) -> None:
    port, gate = servers.ports[server], servers.application.gate
    right, wrong = f"Authorization: Bearer {ADMIN}", "Authorization: Bearer mr_wrong"
    live = raw("GET", "/v2/health/live", host="evil.example")
    sent = [
        raw("POST", PATH, right, host="evil.example"),
        raw("POST", PATH, right, f"Origin: {EVIL}"),
        raw("POST", PATH, wrong, host="evil.example"),
        raw("POST", PATH, wrong, f"Origin: {EVIL}"),
        raw("POST", PATH, host="evil.example"),
        live,
    ]
    repeated = [request for request in sent for _ in range(3)]
    try:
        assert [reply.status for reply in await asked(port, *repeated)] == [200] * 6 + [403] * 12
        gate.load([], others=True)  # from now on calls need a key
        expected = [200] * 6 + [401] * 3 + [403] * 3 + [401] * 3 + [200] * 3
        assert [reply.status for reply in await asked(port, *repeated)] == expected
    finally:
        gate.load([])
    assert [reply.status for reply in await asked(port, *repeated)] == [200] * 6 + [403] * 12


async def test_the_host_counts_for_sagemakers_routes_which_need_no_key(servers: Servers) -> None:
    expected = (403, True) if is_multi_model(servers.application.settings) else (401, False)
    try:
        servers.application.gate.load([], others=True)
        for method, path in (("POST", "/invocations"), ("GET", "/models")):
            [reply] = await asked(servers.ports["plain"], raw(method, path, host="evil.example"))
            assert (reply.status, STRANGE in reply.body) == expected
    finally:
        servers.application.gate.load([])


@pytest.mark.parametrize("server", ["fast path", "plain"])
@pytest.mark.parametrize(
    ("target", "host", "version", "status"),
    [
        (PATH, None, "1.0", 200),
        (PATH, "", "1.1", 200),
        (PATH, "evil.example", "1.0", 403),
        (f"http://evil.example{PATH}", "localhost", "1.1", 200),  # a browser sends this to a proxy, with the same Host
        (f"http://evil.example{PATH}", "evil.example", "1.1", 403),
        (f"http://localhost{PATH}", "evil.example", "1.1", 403),
        (PATH, "user@localhost", "1.1", 400),
        (PATH, "LOCALHOST.:80", "1.1", 200),
    ],
)
async def test_odd_targets_and_hosts(
    servers: Servers, server: str, target: str, host: str | None, version: str, status: int
) -> None:
    [reply] = await asked(servers.ports[server], raw("POST", target, host=host, version=version))
    assert reply.status == status


def test_a_gateway_has_the_names_and_origins_of_its_settings(tmp_path: Path) -> None:
    settings = {"allowed_hosts": "*.models.example", "cors_origins": "https://app.example"}
    with running_stack(tmp_path, settings=settings) as stack:
        del stack.http.headers["authorization"]  # no browser adds it by itself

        def statuses(**headers: str) -> tuple[int, int]:
            sent = {name.replace("_", "-"): value for name, value in headers.items()}
            return (
                stack.http.get("/v2", headers=sent).status_code,
                stack.http.post("/v2/models/none/infer", content=b"{}", headers=sent).status_code,
            )

        answered = (200, 404)
        for _ in range(3):
            for host in ("a.models.example", socket.gethostname(), "localhost:1"):
                assert statuses(host=host) == answered
            assert statuses(origin="https://app.example") == answered
            assert statuses(host="evil.example") == (403, 403)
            assert statuses(origin=EVIL) == (403, 403)
            assert statuses(sec_fetch_site="cross-site") == (403, 403)
