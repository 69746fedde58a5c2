"""Web pages of other origins: what a browser asks, and what it lets a page read. Off unless origins are set."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from millstream.gateway.app import build_app
from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.cors import Cors
from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.fast_path import ConnectionContext, fast_path_protocol
from millstream.services.settings import Settings
from tests.kit.application import Application
from tests.kit.asgi_protocol import asgi_protocol
from tests.kit.handlers import Echo
from tests.kit.wire import Wire, WireReply, chunked, post, request, serving

pytestmark = pytest.mark.anyio
PATH = "/v2/models/now/infer"
PAGE = "https://app.example:8443"
OTHER = "https://evil.example"
BODY_BYTES_MAX = 4096


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


async def ports_of(home: Path, origins: list[str]) -> AsyncIterator[tuple[int, int]]:
    """Yield the ports of the fast path, and of routes alone."""
    echo = Echo()
    application = Application(home, request_bytes_max=BODY_BYTES_MAX, cors_origins=",".join(origins))
    app = build_app(dataclasses.replace(application.app.state.deps, infer=echo))
    cors = Cors(origins) if origins else None
    context = ConnectionContext(browser_guard=application.browser_guard, cors=cors)
    lane = fast_path_protocol(echo, BODY_BYTES_MAX, 100, ReceiveBudget(1 << 24), ReplyBudget(1 << 30), context=context)
    routes_alone = asgi_protocol(Drain(), 100)
    routes_alone.cors = cors
    async with serving(app, lane) as fast, serving(app, routes_alone) as plain:
        yield fast.port, plain.port


@pytest.fixture(scope="module")
async def named(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[int, int]]:
    async for ports in ports_of(tmp_path_factory.mktemp("named"), ["https://one.example", PAGE]):
        yield ports


@pytest.fixture(scope="module")
async def everyone(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[int, int]]:
    async for ports in ports_of(tmp_path_factory.mktemp("all"), ["*"]):
        yield ports


@pytest.fixture(scope="module")
async def off(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[int, int]]:
    async for ports in ports_of(tmp_path_factory.mktemp("off"), []):
        yield ports


async def ask(ports: tuple[int, int], sent: bytes) -> WireReply:
    """Return the reply; that of the fast path and that of routes alone agree."""
    replies = []
    for port in ports:
        async with await Wire.connect(port) as wire:
            await wire.send(sent)
            replies.append(await wire.reply())
    assert replies[0].status == replies[1].status
    assert cors(replies[0]) == cors(replies[1])
    return replies[0]


def cors(reply: WireReply) -> dict[str, str]:
    found = {name.decode(): value.decode() for name, value in reply.headers.items()}
    return {name: value for name, value in found.items() if name.startswith("access-control-") or name == "vary"}


REQUESTS = {
    "infer": post(PATH, b"{}", "Origin: {}"),
    "route": request("GET", "/v2", "Origin: {}"),
    "no such path": request("GET", "/nothing", "Origin: {}"),
    "wrong method": request("DELETE", "/v2", "Origin: {}"),
    "too large": post(PATH, b"x" * (BODY_BYTES_MAX + 1), "Origin: {}"),
    "too large in chunks": chunked(PATH, [b"x" * 1000] * 5, "Origin: {}"),
    "not HTTP": b"GET / HTTP/1.1\r\nHost: a b\r\nOrigin: {}\r\n\r\n",
}


@pytest.mark.parametrize("which", REQUESTS)
async def test_a_page_of_a_named_origin_may_read_every_reply(named: tuple[int, int], which: str) -> None:
    async def headers(origin: str) -> dict[str, str]:
        return cors(await ask(named, REQUESTS[which].replace(b"{}", origin.encode(), 1)))

    if which == "infer":  # the body has the braces, too
        sent = [post(PATH, b"{}", f"Origin: {origin}") for origin in (PAGE, OTHER)]
        allowed, refused = [cors(await ask(named, one)) for one in sent]
    else:
        allowed, refused = await headers(PAGE), await headers(OTHER)
    exposed = allowed.pop("access-control-expose-headers")
    assert allowed == {
        "access-control-allow-origin": PAGE,
        "access-control-allow-credentials": "true",
        "vary": "Origin",
    }
    assert "x-request-id" in exposed
    assert "inference-header-content-length" in exposed
    assert refused == {"vary": "Origin"}


async def test_a_caller_that_is_no_page_learns_that_replies_differ(named: tuple[int, int]) -> None:
    assert cors(await ask(named, post(PATH, b"{}"))) == {"vary": "Origin"}
    assert cors(await ask(named, post(PATH, b"{}", "Origin: null"))) == {"vary": "Origin"}


@pytest.mark.parametrize("path", [PATH, "/v2", "/nothing", "/v1/models/m:predict", "/admin/v1/models", "/"])
async def test_a_preflight_is_answered_on_every_path(named: tuple[int, int], path: str) -> None:
    asked = "Access-Control-Request-Method: POST", "Access-Control-Request-Headers: content-type, authorization"
    reply = await ask(named, request("OPTIONS", path, f"Origin: {PAGE}", *asked))
    assert (reply.status, reply.body) == (204, b"")
    headers = cors(reply)
    assert headers["access-control-allow-origin"] == PAGE
    assert "POST" in headers["access-control-allow-methods"]
    assert headers["access-control-allow-headers"] == "content-type, authorization"
    assert headers["access-control-max-age"] == "600"
    assert b"vary: Origin\r\n" in reply.head


async def test_a_preflight_of_another_origin_is_refused(named: tuple[int, int]) -> None:
    reply = await ask(named, request("OPTIONS", PATH, f"Origin: {OTHER}", "Access-Control-Request-Method: POST"))
    assert reply.status == 403
    assert b"MILLSTREAM_CORS_ORIGINS" in reply.body
    assert cors(reply) == {"vary": "Origin"}


@pytest.mark.parametrize("names", ["x" * 2000, "a\x01b", 'a"b', "é"])
async def test_odd_header_names_are_not_allowed(named: tuple[int, int], names: str) -> None:
    asked = "Access-Control-Request-Method: POST", f"Access-Control-Request-Headers: {names}"
    for port in named:
        async with await Wire.connect(port) as wire:
            await wire.send(request("OPTIONS", PATH, f"Origin: {PAGE}", *asked))
            reply = await wire.reply()
            assert reply.status in {204, 400}  # the parser refuses control characters
            assert "access-control-allow-headers" not in cors(reply)


async def test_options_that_are_no_preflight_reach_the_routes(named: tuple[int, int]) -> None:
    assert (await ask(named, request("OPTIONS", "/v2", f"Origin: {PAGE}"))).status == 405
    assert (await ask(named, request("OPTIONS", "/v2"))).status == 405


async def test_all_origins_get_no_credentials(everyone: tuple[int, int]) -> None:
    for sent in (post(PATH, b"{}", f"Origin: {OTHER}"), request("GET", "/v2")):
        headers = cors(await ask(everyone, sent))
        headers.pop("access-control-expose-headers")
        assert headers == {"access-control-allow-origin": "*"}
    reply = await ask(everyone, request("OPTIONS", PATH, f"Origin: {OTHER}", "Access-Control-Request-Method: POST"))
    assert reply.status == 204
    assert "access-control-allow-credentials" not in cors(reply)


async def test_without_origins_no_page_may_read(off: tuple[int, int]) -> None:
    assert cors(await ask(off, post(PATH, b"{}", f"Origin: {PAGE}"))) == {}
    reply = await ask(off, request("OPTIONS", PATH, f"Origin: {PAGE}", "Access-Control-Request-Method: POST"))
    assert (reply.status, cors(reply)) == (403, {})


async def test_a_repeated_head_is_answered_for_its_own_origin(named: tuple[int, int]) -> None:
    async with await Wire.connect(named[0]) as wire:
        for origin, allowed in [(PAGE, PAGE)] * 4 + [(OTHER, None)] * 4 + [(PAGE, PAGE)] * 2:
            await wire.send(post(PATH, b"{}", f"Origin: {origin}"))
            assert cors(await wire.reply()).get("access-control-allow-origin") == allowed


@pytest.mark.parametrize(
    "text",
    [
        "app.example",
        "https://app.example/",
        "https://app.example/path",
        "ftp://app.example",
        "null",
        "*, https://app.example",
        "https://*.example",
        "https://a b",
        "https://app.example:port",
        "https://app.example\r\nX: 1",
    ],
)
def test_a_setting_that_is_no_origin_stops_the_start(text: str) -> None:
    with pytest.raises(ValidationError, match="cors_origins"):
        Settings.model_validate({"cors_origins": text})


def test_origins_are_read_in_any_case() -> None:
    settings = Settings.model_validate({"cors_origins": " HTTPS://App.Example , http://[::1]:3000,"})
    assert settings.cors_origin_list == ["https://app.example", "http://[::1]:3000"]
