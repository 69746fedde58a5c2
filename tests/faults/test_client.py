"""The client against servers that are dead, slow, broken or of another kind: one clear line for each, and in time."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from millstream import AsyncClient, Client, ConnectionFailed, Failure, ServerError, Timeout
from millstream.client import transport
from millstream.client.errors import Cause
from tests.kit.odd_servers import CERTIFICATES, OddServer, answering, http, odd_server

SETTINGS_FRAME = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
MODELS = http(b'{"models": []}')

Ask = Callable[..., Any]


def blocking(
    url: str, method: str = "models", *arguments: Any, options: dict[str, Any] | None = None, **named: Any
) -> Any:
    with Client(url, **{"retries": 0, **(options or {})}) as client:
        return getattr(client, method)(*arguments, **named)


def awaiting(
    url: str, method: str = "models", *arguments: Any, options: dict[str, Any] | None = None, **named: Any
) -> Any:
    async def ask() -> Any:
        async with AsyncClient(url, **{"retries": 0, **(options or {})}) as client:
            return await getattr(client, method)(*arguments, **named)

    return asyncio.run(ask())


@pytest.fixture(params=[blocking, awaiting])
def ask(request: pytest.FixtureRequest) -> Ask:
    """Call a method of a client that exists for this call; both clients are tried."""
    found: Ask = request.param
    return found


@contextmanager
def refusing_port() -> Iterator[int]:
    """Yield a port that refuses connections: nobody listens there, and nobody else can have it."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        yield int(one.getsockname()[1])


def failed(ask: Ask, url: str, **named: Any) -> ConnectionFailed:
    with pytest.raises(ConnectionFailed) as error:
        ask(url, **named)
    assert "\n" not in error.value.message
    return error.value


def test_a_refused_connection(ask):
    with refusing_port() as port:
        failure = failed(ask, f"http://127.0.0.1:{port}")
    assert failure.cause is Cause.REFUSED
    assert "is `millstream up` running?" in failure.message


def test_an_unknown_host(ask):
    failure = failed(ask, "http://models.invalid:8000")
    assert failure.cause is Cause.UNKNOWN_HOST
    assert "'models.invalid'" in failure.message


def test_plain_http_to_a_tls_port(ask):
    with odd_server(answering(MODELS), tls=True) as server:
        failure = failed(ask, server.url)
    assert failure.cause is Cause.TLS
    assert "speaks TLS: write https:// instead of http://" in failure.message


def test_tls_to_a_plain_http_port(ask):
    def answer(server: OddServer, connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(http(b"", "400 Bad Request"))

    with odd_server(answer) as server:
        failure = failed(ask, f"https://127.0.0.1:{server.port}")
    assert failure.cause is Cause.TLS
    assert "speaks plain HTTP, not TLS: write http:// instead of https://" in failure.message


def test_an_unknown_authority_is_refused_and_a_named_one_is_trusted(ask, tmp_path):
    with odd_server(answering(MODELS), tls=True) as server:
        url = f"https://127.0.0.1:{server.port}"
        failure = failed(ask, url)
        assert failure.cause is Cause.TLS
        assert "is not trusted" in failure.message
        assert "ca_file" in failure.message
        assert ask(url, options={"ca_file": CERTIFICATES / "ca.pem"}) == []
        for content in (None, "no certificate"):
            path = tmp_path / "ca.pem"
            if content is not None:
                path.write_text(content)
            with pytest.raises(Failure, match="ca_file"):
                ask(url, options={"ca_file": path})


def test_http_2_on_the_port(ask):
    def answer(server: OddServer, connection: socket.socket) -> None:
        connection.sendall(SETTINGS_FRAME)
        connection.recv(65536)

    with odd_server(answer) as server:
        failure = failed(ask, server.url)
    assert failure.cause is Cause.PROTOCOL
    assert "is the gRPC port" in failure.message
    assert "HTTP is usually on port 8000" in failure.message


def test_bytes_that_are_not_http(ask):
    with odd_server(answering(b"SSH-2.0-OpenSSH_9.2\r\n")) as server:
        failure = failed(ask, server.url)
    assert "127.0.0.1" in failure.message


@pytest.mark.parametrize(
    "reply",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + b"x" * 40,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\nxxx",
    ],
)
def test_half_a_reply(ask, reply):
    with odd_server(answering(reply)) as server:
        failure = failed(ask, server.url, options={"retries": 4})
        assert server.connections == 1
    assert failure.cause is Cause.INCOMPLETE


def test_a_server_that_closes_without_a_reply_is_asked_again_only_if_that_is_safe(ask):
    with odd_server(answering(b"")) as server:
        assert failed(ask, server.url).cause is Cause.CLOSED
    heads: list[bytes] = []

    def answer(server: OddServer, connection: socket.socket) -> None:
        head = connection.recv(65536)
        heads.append(head.partition(b"\r\n")[0])
        if sum(one.startswith(b"GET") for one in heads) > 1:
            connection.sendall(MODELS)

    with odd_server(answer) as server:
        assert ask(server.url, options={"retries": 2}) == []
    heads.clear()
    with odd_server(answer) as server:
        failed(ask, server.url, method="unload", model="m", options={"retries": 2})
    assert [one for one in heads if one.startswith(b"POST")] == [b"POST /v2/repository/models/m/unload HTTP/1.1"]


def test_a_full_server_is_asked_again_as_it_says(ask):
    full = http(b'{"error": "the gateway is full"}', "503 Service Unavailable", Retry_After="1")
    with odd_server(answering(full, MODELS)) as server:
        assert ask(server.url, options={"retries": 1}) == []
        assert server.connections == 2
    later = http(b'{"error": "the gateway is full"}', "503 Service Unavailable", Retry_After="1000")
    with odd_server(answering(later)) as server:
        with pytest.raises(ServerError, match="the gateway is full") as error:
            ask(server.url, options={"retries": 4, "timeout": 60})
        assert server.connections == 1
    assert (error.value.status, error.value.retry_after_s) == (503, 1000)


def test_a_server_that_never_answers(ask):
    def answer(server: OddServer, connection: socket.socket) -> None:
        server.ended.wait()

    with odd_server(answer) as server:
        with pytest.raises(Timeout, match="GET /admin/v1/models"):
            ask(server.url, options={"timeout": 0.5})
        with pytest.raises(Timeout, match="GET /v2/models/m"):
            ask(server.url, "predict", "m", [1.0], timeout=0.5)


def test_a_reply_that_trickles_ends_with_the_timeout(ask):
    """Each byte comes in time, the whole reply does not."""

    def answer(server: OddServer, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
        while not server.ended.wait(0.01):
            connection.sendall(b"x")

    # The second of them if the machine is so busy that no byte came for 2 s.
    said = "was not complete after|did not answer"
    with odd_server(answer) as server, pytest.raises(Timeout, match=said):
        ask(server.url, options={"timeout": 2})


def test_a_reply_without_end_is_cut(ask, monkeypatch):
    monkeypatch.setattr(transport, "REPLY_BYTES_MAX", 1 << 20)

    def answer(server: OddServer, connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        while not server.ended.is_set():
            connection.sendall(bytes(65536))

    with odd_server(answer) as server, pytest.raises(Failure, match="the reply is larger than 1048576 bytes"):
        ask(server.url)


@pytest.mark.parametrize("body", [b"", b"<html>hello</html>", b"[]", b'"models"', b"{}", b"\xff", b"[" * 100_000])
def test_another_server_is_recognised(ask, body):
    with odd_server(answering(http(body))) as server, pytest.raises(Failure, match="is not a Millstream server"):
        ask(server.url)


@pytest.mark.parametrize(
    "answer",
    [
        {"outputs": [{"name": "y", "datatype": "FP32", "shape": [2], "parameters": {"binary_data_size": 4}}]},
        {"outputs": [{"name": "y", "datatype": "BYTES", "shape": [10**12], "parameters": {"binary_data_size": 0}}]},
        {"outputs": [{"name": "y", "datatype": "NEW", "shape": [1], "data": [1]}]},
        {"outputs": [{"name": "y"}]},
        {"outputs": None},
        {},
    ],
)
def test_replies_to_inference_that_are_none(ask, answer):
    metadata = {"name": "m", "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1]}], "outputs": []}
    replies = [http(json.dumps(document).encode()) for document in (metadata, answer)]
    with odd_server(answering(*replies)) as server, pytest.raises(Failure, match="is not an inference response"):
        ask(server.url, "predict", "m", [1.0])


def test_a_proxy_that_compresses_unasked(ask):
    packed = gzip.compress(b'{"models": []}')
    with odd_server(answering(http(packed, Content_Encoding="gzip"))) as server:
        assert ask(server.url) == []
    with odd_server(answering(http(b"no gzip", Content_Encoding="gzip"))) as server, pytest.raises(Failure):
        ask(server.url)


def test_redirects_are_not_followed(ask):
    """The key would go to another server."""
    with odd_server(answering(MODELS)) as other:
        moved = http(b"", "307 Temporary Redirect", Location=other.url)
        with odd_server(answering(moved)) as server, pytest.raises(ServerError, match="status 307"):
            ask(server.url, options={"key": "secret"})
        assert other.connections == 0


def test_an_upload_that_is_refused_early_ends_with_the_servers_words(ask, tmp_path):
    file = tmp_path / "large.onnx"
    with file.open("wb") as content:
        content.truncate(64 << 20)

    def answer(server: OddServer, connection: socket.socket) -> None:
        connection.recv(1000)
        connection.sendall(http(b'{"error": "too large"}', "413 Content Too Large"))
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(1 << 20):
            pass

    with odd_server(answer) as server, pytest.raises(ServerError, match="too large"):
        ask(server.url, "push", "m", file)


def test_a_server_that_dies_during_an_upload(ask, tmp_path):
    file = tmp_path / "large.onnx"
    with file.open("wb") as content:
        content.truncate(64 << 20)

    def answer(server: OddServer, connection: socket.socket) -> None:
        connection.recv(1000)

    with odd_server(answer) as server:
        assert failed(ask, server.url, method="push", model="m", path=file, options={"retries": 4}).cause in {
            Cause.CLOSED,
            Cause.PROTOCOL,
        }
        uploads = server.connections
    assert uploads <= 3  # the upload, and two to find out what the port speaks


def test_a_progress_callback_may_stop_an_upload(ask, tmp_path):
    (tmp_path / "m.onnx").write_bytes(bytes(1000))

    class Enough(Exception):
        pass

    def progress(sent: int, size: int) -> None:
        raise Enough

    with odd_server(answering(http(b"{}"))) as server, pytest.raises(Enough):
        ask(server.url, "push", "m", tmp_path / "m.onnx", progress=progress)


def test_proxies_of_the_environment_are_not_used(ask, monkeypatch):
    with refusing_port() as port, odd_server(answering(MODELS)) as server:
        for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        assert ask(server.url) == []
