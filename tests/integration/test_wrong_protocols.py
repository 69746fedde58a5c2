"""Clients of another protocol on a port: real TLS, gRPC and HTTP clients, and what each of them says."""

from __future__ import annotations

import http.client
import socket
import ssl
import urllib.error
import urllib.request

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from millstream.gateway.connection.foreign_protocol import LOG_EVERY_S, PLAIN_GRPC, ForeignLog, recognise
from tests.kit.stack import Stack
from tests.kit.wait import wait_until

WAIT_S = 120.0


def test_tls_on_the_http_port(stack: Stack) -> None:
    with pytest.raises(urllib.error.URLError) as caught:
        urllib.request.urlopen(stack.url.replace("http:", "https:"), timeout=WAIT_S)
    assert isinstance(caught.value.reason, ssl.SSLError)
    assert "WRONG_VERSION_NUMBER" in str(caught.value.reason)  # OpenSSL's word for a plain HTTP answer
    wait_until(lambda: "TLS on the HTTP port, last from 127.0.0.1: this port speaks plain HTTP" in stack.logs())


def test_the_answer_to_tls_says_what_to_do(stack: Stack) -> None:
    with socket.create_connection(("127.0.0.1", stack.port), WAIT_S) as client:
        client.sendall(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(506))
        reply = http.client.HTTPResponse(client)
        reply.begin()
        assert reply.status == 400
        assert b"call http://" in reply.read()


def test_grpc_on_the_http_port(stack: Stack) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{stack.port}") as channel, pytest.raises(grpc.RpcError) as caught:
        service_pb2_grpc.GRPCInferenceServiceStub(channel).ServerLive(pb.ServerLiveRequest(), timeout=WAIT_S)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE  # at once, and not after the timeout
    assert "http1.x server (HTTP status 400)" in caught.value.details()
    wait_until(lambda: "HTTP/2 on the HTTP port" in stack.logs())


def test_http_on_the_grpc_port(stack: Stack) -> None:
    """The answer is a SETTINGS frame, which is no HTTP/1 status line, and the connection is closed."""
    host, _, port = stack.grpc.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=WAIT_S)
    with pytest.raises((http.client.HTTPException, OSError)):
        connection.request("GET", "/v2/health/live")
        connection.getresponse()
    connection.close()


def test_the_log_has_a_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    foreign_log = ForeignLog(lambda: now)
    foreign = recognise(b"\x16\x03\x01")
    assert foreign is not None
    for _ in range(1000):
        foreign_log.count(foreign, "192.0.2.1")
    now = LOG_EVERY_S
    foreign_log.count(foreign, "192.0.2.2")
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "1 x TLS on the HTTP port, last from 192.0.2.1",
        "1000 x TLS on the HTTP port, last from 192.0.2.2",
    ]


def test_the_log_names_the_port(caplog: pytest.LogCaptureFixture) -> None:
    ForeignLog(lambda: 0.0, "gRPC").count(PLAIN_GRPC, "192.0.2.1")
    assert caplog.messages[0].startswith(
        "1 x a client without TLS on the gRPC port, last from 192.0.2.1: this port speaks"
    )


@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1", b"PRI", b"hello", b"\x15\x03\x01"])
def test_other_bytes_are_not_recognised(data: bytes) -> None:
    assert recognise(data) is None
