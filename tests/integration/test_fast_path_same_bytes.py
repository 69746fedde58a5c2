"""The fast path against the ASGI route: the same bytes in, the same bytes out.

One application and one handler, which says what it was asked, behind both. After each case a second request is sent,
so that what a case leaves of its connection is compared too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from millstream.gateway.app import build_app
from millstream.gateway.connection.budgets import ReceiveBudget, ReplyBudget
from millstream.gateway.connection.drain import Drain
from millstream.gateway.connection.fast_path import fast_path_protocol
from tests.kit.application import Application
from tests.kit.asgi_protocol import asgi_protocol
from tests.kit.handlers import Echo
from tests.kit.wire import Wire, chunked, post, request, serving

pytestmark = pytest.mark.anyio
BODY_BYTES_MAX = 65536
PATH = "/v2/models/m/infer"
LAST = request("GET", "/v2/health/live", "Connection: close")
LARGE = bytes(range(256)) * 250
Ports = tuple[int, int]


@pytest.fixture(scope="module")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def ports(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ports]:
    """The fast path's, and that of plain uvicorn."""
    home: Path = tmp_path_factory.mktemp("home")
    application = Application(home, request_bytes_max=BODY_BYTES_MAX)
    echo = Echo()
    app = build_app(dataclasses.replace(application.app.state.deps, infer=echo))
    lane = fast_path_protocol(echo, BODY_BYTES_MAX, 100, ReceiveBudget(1 << 24), ReplyBudget(1 << 30))
    async with serving(app, lane) as fast, serving(app, asgi_protocol(Drain(), 100)) as plain:
        yield fast.port, plain.port


async def transcript(port: int, *segments: bytes) -> bytes:
    """All that a server says to these segments and to LAST."""
    async with await Wire.connect(port) as wire:
        await wire.send(*segments, LAST)
        return await wire.rest()


CASES = {
    "json": post(PATH, b'{"inputs":[]}', "Content-Type: application/json"),
    "empty body": post(PATH),
    "no length and no chunks": request("POST", PATH),
    "binary": post(PATH, LARGE, "Inference-Header-Content-Length: 3"),
    "chunks": chunked(PATH, [b"abc", b"d" * 1000, b"e"]),
    "no chunk but the last": chunked(PATH, []),
    "chunks with extensions and trailers": chunked(
        PATH, [b"abc"], end=b'2;x=1;y="a"\r\nde\r\n0\r\nX-Trailer: 1\r\nMore: 2\r\n\r\n'
    ),
    "version in the path": post("/v2/models/m/versions/3/infer", b"{}"),
    "odd version in the path": post("/v2/models/m/versions/one/infer", b"{}"),
    "no version in the path": post("/v2/models/m/versions//infer", b"{}"),
    "no model in the path": post("/v2/models//infer", b"{}"),
    "slash at the end": post(PATH + "/", b"{}"),
    "more in the path": post("/v2/models/m/versions/3/infer/x", b"{}"),
    "another verb of a model": post("/v2/models/m/generate", b"{}"),
    "encoded name": post("/v2/models/a%20b%C3%A9%2e/infer", b"{}"),
    "encoded slash": post("/v2/models/a%2Fb/infer", b"{}"),
    "encoded slash behind the model": post("/v2/models/m%2finfer", b"{}"),
    "encoded slash around a version": post("/v2/models/m/versions%2F3/infer", b"{}"),
    "encoded slash in a query": post(PATH + "?x=%2F", b"{}"),
    "encoded infer": post("/v2/models/m/%69nfer", b"{}"),
    "encoded newline": post("/v2/models/m/infer%0A", b"{}"),
    "encoded bytes that are no text": post("/v2/models/%ff%fe/infer", b"{}"),
    "half an escape": post("/v2/models/a%2/infer", b"{}"),
    "dots": post("/v2/models/../infer", b"{}"),
    "request id": post(PATH, b"{}", "X-Request-Id: abc-1"),
    "request id with space around it": post(PATH, b"{}", "X-REQUEST-ID: \t abc-1  "),
    "request id of other characters": post(PATH, b"{}", "X-Request-Id: a b"),
    "request id that is no ASCII": post(PATH, b"{}", "X-Request-Id: \xe9\xff"),
    "request id that is empty": post(PATH, b"{}", "X-Request-Id:"),
    "request id that is too long": post(PATH, b"{}", "X-Request-Id: " + "x" * 129),
    "request id twice": post(PATH, b"{}", "X-Request-Id: a", "X-Request-Id: b"),
    "request id, too large": post(PATH, b"x" * (BODY_BYTES_MAX + 1), "X-Request-Id: abc-2"),
    "request id, too much in chunks": chunked(PATH, [b"x" * 1000] * 100, "X-Request-Id: abc-3"),
    "request id of another route": request("GET", "/v2", "X-Request-Id: abc-4"),
    "request id of no route": request("GET", "/nothing", "X-Request-Id: abc-5"),
    "request id of a wrong method": request("DELETE", "/v2", "X-Request-Id: abc-6"),
    "request id, another status": post("/v2/models/odd/infer", b"{}", "X-Request-Id: abc-7"),
    "query": post(PATH + "?a=1&b=%20", b"{}"),
    "query that names infer": post("/v2/models/m?/infer", b"{}"),
    "fragment": post(PATH + "#x", b"{}"),
    "whole URL": post("http://test/v2/models/m/infer", b"{}"),
    "long URL": post(PATH + "?" + "x" * 5000, b"{}"),
    "asterisk": request("OPTIONS", "*"),
    "encodings": post(PATH, b"{}", "Content-Encoding:  GZip ", "Accept-Encoding: gzip, deflate"),
    "identity": post(PATH, b"{}", "Content-Encoding: identity"),
    "a header twice": post(PATH, b"{}", "Accept-Encoding: gzip", "Accept-Encoding: br"),
    "two keys": post(PATH, b"{}", "Authorization: Bearer a", "authorization: Bearer a"),
    "two keys of another route": request("GET", "/v2", "X-API-Key: a", "X-Api-Key: b"),
    "two lengths of JSON": post(PATH, b"{}", *("Inference-Header-Content-Length: 2",) * 2),
    "two hosts": post(PATH, b"{}", "Host: other"),
    "empty headers": post(PATH, b"{}", "Content-Encoding:", "Inference-Header-Content-Length:"),
    "headers that are no ASCII": post(PATH, b"{}", "Accept-Encoding: \xe9", "X-Name: \xff"),
    "GET": request("GET", PATH),
    "HEAD": request("HEAD", PATH),
    "PUT": request("PUT", PATH, "Content-Length: 2") + b"{}",
    "PATCH": request("PATCH", PATH, "Content-Length: 2") + b"{}",
    "DELETE": request("DELETE", PATH),
    "OPTIONS": request("OPTIONS", PATH),
    "connection close": post(PATH, b"{}", "Connection: close"),
    "connection keep-alive": post(PATH, b"{}", "Connection: keep-alive"),
    "HTTP/1.0": post(PATH, b"{}", version="1.0"),
    "HTTP/1.0, keep-alive": post(PATH, b"{}", "Connection: keep-alive", version="1.0"),
    "HTTP/1.0 without a length": request("POST", PATH, version="1.0"),
    "upgrade that is not asked for": post(PATH, b"{}", "Upgrade: h2c"),
    "expect": post(PATH, b"{}", "Expect: 100-continue"),
    "expect in capitals": post(PATH, b"{}", "EXPECT: 100-CONTINUE"),
    "expect something else": post(PATH, b"{}", "Expect: cake"),
    "expect without a body": post(PATH, b"", "Expect: 100-continue"),
    "too long": post(PATH, b"x" * (BODY_BYTES_MAX + 1)),
    "as long as it may be": post(PATH, b"x" * BODY_BYTES_MAX),
    "too long, but for nothing known": post("/v2/models/nothing", b"x" * (BODY_BYTES_MAX + 1)),
    "far too long": post(PATH, b"x" * (16 * BODY_BYTES_MAX)),
    "expect, too long": post(PATH, b"x" * (BODY_BYTES_MAX + 1), "Expect: 100-continue"),
    "too much in chunks": chunked(PATH, [b"x" * 1000] * 100),
    "as much in chunks as it may be": chunked(PATH, [b"x" * 4096] * 16),
    "answered at once": post("/v2/models/now/infer", b"{}"),
    "answered at once, close": post("/v2/models/now/infer", b"{}", "Connection: close"),
    "a large reply": post("/v2/models/large/infer", b"{}"),
    "another status": post("/v2/models/odd/infer", b"{}"),
    "another status, close": post("/v2/models/odd/infer", b"{}", "Connection: close"),
    "empty lines before the request": b"\r\n\r\n" + post(PATH, b"{}"),
    "pipelined": b"".join(post(f"/v2/models/m{i}/infer", b"x" * i) for i in range(40)),
    "pipelined, answered at once": post(PATH, b"{}") + post("/v2/models/now/infer", b"{}") * 40,
    "pipelined and mixed": b"".join(
        (
            post(PATH, b"1"),
            request("GET", "/v2"),
            post("/v2/models/now/infer", b"2"),
            request("HEAD", "/v2"),
            post("/v2/models/large/infer", b"3"),
            chunked(PATH, [b"4", b"5"]),
            request("PUT", PATH, "Content-Length: 1") + b"6",
            post(PATH, b"x" * (BODY_BYTES_MAX + 1)),
            post("/v2/models/nothing", b"7"),
            post(PATH, b"8", "Expect: 100-continue"),
        )
    )
    * 5,
    "pipelined behind a close": post(PATH, b"1") + post(PATH, b"2", "Connection: close") + post(PATH, b"3"),
    "pipelined behind a close that is answered at once": post("/v2/models/now/infer", b"2", "Connection: close")
    + post(PATH, b"3")
    + request("GET", "/v2"),
}


@pytest.mark.parametrize("case", CASES)
async def test_in_one_segment(ports: Ports, case: str) -> None:
    fast, plain = [await transcript(port, CASES[case]) for port in ports]
    assert fast.startswith(b"HTTP/1.1 ")
    assert fast == plain


@pytest.mark.parametrize("case", [case for case in CASES if len(CASES[case]) < 600 and "behind" not in case])
async def test_byte_by_byte(ports: Ports, case: str) -> None:
    segments = [bytes([byte]) for byte in CASES[case]]
    fast = await transcript(ports[0], *segments)
    assert fast == await transcript(ports[1], *segments)


@pytest.mark.parametrize("size", [997, 4093])
@pytest.mark.parametrize("case", ["binary", "chunks", "too much in chunks", "pipelined", "pipelined and mixed"])
async def test_in_pieces(ports: Ports, case: str, size: int) -> None:
    data = CASES[case]
    segments = [data[at : at + size] for at in range(0, len(data), size)]
    fast, plain = [await transcript(port, *segments) for port in ports]
    assert fast == plain


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("two keys", b"a request has one Authorization header"),
        ("two keys of another route", b"a request has one X-Api-Key header"),
        ("two lengths of JSON", b"a request has one Inference-Header-Content-Length header"),
        ("encoded slash", b"a model name has no slash"),
        ("encoded slash behind the model", b"a model name has no slash"),
        ("encoded slash around a version", b"a model name has no slash"),
    ],
)
async def test_an_ambiguous_request_is_refused(ports: Ports, case: str, says: bytes) -> None:
    """Also when the same head comes again, which the fast path may know by its bytes."""
    for _ in range(3):
        for port in ports:
            said = await transcript(port, CASES[case])
            assert said.startswith(b"HTTP/1.1 400 ")
            assert says in said


async def test_the_handler_gets_what_was_sent(ports: Ports) -> None:
    """The equality above would hold for two adapters with the same fault."""
    async with await Wire.connect(ports[0]) as wire:
        headers = "Content-Encoding: gzip", "Accept-Encoding: deflate", "Inference-Header-Content-Length: 2"
        await wire.send(post("/v2/models/a%20b/versions/7/infer?x=y", b"hello", *headers))
        sha256 = b"2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
        reply = await wire.reply()
        assert reply.body == b'["a b","7",["gzip","deflate","2",null,null,null,null,null],5,"%b"]' % sha256
        assert (reply.status, reply.headers[b"content-type"]) == (200, b"application/json")


async def test_trailers_are_no_headers(ports: Ports) -> None:
    """Plain uvicorn takes them for headers; a check of the headers before that would not have seen them."""
    async with await Wire.connect(ports[0]) as wire:
        await wire.send(chunked(PATH, [b"a"], end=b"0\r\nContent-Encoding: gzip\r\n\r\n"))
        assert (await wire.reply()).body.startswith(b'["m",null,[null,null,null,null,null,null,null,null],1,')


H2C = "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQ"
WEBSOCKET = (
    "Connection: keep-alive, Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
)


@pytest.mark.parametrize("offer", [H2C, WEBSOCKET], ids=["h2c", "websocket"])
async def test_an_offer_of_another_protocol_costs_no_body(ports: Ports, offer: tuple[str, ...]) -> None:
    """Plain uvicorn takes what follows such a head for that protocol: the application would see an empty body."""
    offered = [post(PATH, b"hello", *offer), chunked(PATH, [b"hel", b"lo"], *offer), request("GET", "/v2", *offer)]
    asked = [post(PATH, b"hello"), chunked(PATH, [b"hel", b"lo"]), request("GET", "/v2")]
    expected = await transcript(ports[0], *asked)
    assert await transcript(ports[0], *offered) == expected
    assert await transcript(ports[0], b"".join(offered)) == expected
    assert await transcript(ports[0], *[bytes([byte]) for byte in b"".join(offered)]) == expected
    many = b"".join(offered) * 300
    assert (await transcript(ports[0], many)).count(b"200 OK") == 901


@pytest.mark.parametrize("offer", [(), ("Connection: Upgrade", "Upgrade: h2c")])
async def test_connect_is_refused_and_ends_the_connection(ports: Ports, offer: tuple[str, ...]) -> None:
    async with await Wire.connect(ports[0]) as wire:
        await wire.send(request("CONNECT", "/v2", *offer))
        reply = await wire.reply()
        assert (reply.status, reply.body) == (405, b'{"error":"Method Not Allowed"}')
        assert reply.headers[b"connection"] == b"close"


@pytest.mark.parametrize(
    "last",
    [
        post(PATH, b"hello"),
        post(PATH, b"hello") + post(PATH, b"other"),
        post(PATH, b"hello") + post("/v2/models/n/infer", b"there"),
        post(PATH, b"hello") + request("GET", "/v2"),
        post(PATH, b"hell\r\n\r\n!", "X-Other: 1"),
        b"\r\n" + post(PATH, b"hello"),
    ],
)
@pytest.mark.parametrize("cut", [1, 40, 1000])
async def test_a_head_that_was_sent_before(ports: Ports, last: bytes, cut: int) -> None:
    """From its third time on a head is known by its bytes: what comes with it is answered as ever."""
    answers = []
    for port in ports:
        async with await Wire.connect(port) as wire:
            got = []
            for _ in range(4):
                await wire.send(post(PATH, b"hello"))
                got.append(await wire.reply())
            await wire.send(last[:-cut] or last[:1], last[-cut:] if last[:-cut] else last[1:])
            got += [await wire.reply() for _ in range(last.count(b"HTTP/1.1\r\n"))]
            answers.append([(reply.head, reply.body) for reply in got])  # the date may differ
    assert answers[0] == answers[1]
    assert len(set(answers[0][:4])) == 1
