"""Exporters of traces with collectors that want TLS, close connections, redirect or never answer."""

from __future__ import annotations

import socket
import ssl
import threading
from contextlib import suppress
from functools import partial

import pytest

from millstream.plugins.tracing.export import ExportError, exporter
from millstream.plugins.tracing.gateway.tracer import Tracer
from millstream.plugins.tracing.otel_variables import read_variables
from millstream.plugins.tracing.otlp import encode
from millstream.services.metrics.registry import MetricsRegistry
from tests.kit.otlp import grpc_collector, http_collector
from tests.kit.tls import CERTIFICATES
from tests.unit.test_tracer import finished

BASE = "OTEL_EXPORTER_OTLP_"


def variables(url: str, **more: str) -> dict[str, str]:
    return {f"{BASE}ENDPOINT": url} | {f"{BASE}{name}": value for name, value in more.items()}


def server_tls() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")
    return context


def test_https_with_certificates_of_its_own() -> None:
    with http_collector(tls=server_tls()) as collector:
        given = variables(
            collector.url,
            CERTIFICATE=str(CERTIFICATES / "ca.pem"),
            CLIENT_CERTIFICATE=str(CERTIFICATES / "server.pem"),
            CLIENT_KEY=str(CERTIFICATES / "server.key"),
        )
        sender = exporter(read_variables(given).target)
        for _ in range(2):
            assert sender.send(b"") == b""
        sender.close()
        assert len(collector.bodies) == 2


def test_https_collector_that_is_not_trusted_gets_nothing() -> None:
    with http_collector(tls=server_tls()) as collector:
        sender = exporter(read_variables(variables(collector.url)).target)
        with pytest.raises(ExportError, match="certificate verify failed"):
            sender.send(b"")
        assert collector.bodies == []


def test_grpc_sends_headers_and_compresses() -> None:
    with grpc_collector() as collector:
        given = variables(collector.url, PROTOCOL="grpc", HEADERS="X-Tenant=a", COMPRESSION="gzip")
        sender = exporter(read_variables(given).target)
        assert sender.send(b"") == b""
        sender.close()
        assert collector.headers[0]["x-tenant"] == "a"


def test_grpc_collector_that_is_away_may_be_asked_again() -> None:
    with grpc_collector() as collector:
        url = collector.url
    sender = exporter(read_variables(variables(url, PROTOCOL="grpc", TIMEOUT="500")).target)
    with pytest.raises(ExportError) as failed:
        sender.send(b"")
    sender.close()
    assert failed.value.again


@pytest.mark.parametrize(("status", "again"), [(301, False), (400, False), (404, False), (429, True), (503, True)])
def test_statuses_that_may_be_tried_again(status: int, again: bool) -> None:
    with http_collector() as collector:
        collector.statuses.append(status)
        sender = exporter(read_variables(variables(collector.url)).target)
        with pytest.raises(ExportError, match=f"status {status}") as failed:
            sender.send(b"")
        assert failed.value.again is again
        assert sender.send(b"") == b"", "the connection is used again"
        sender.close()


def test_idle_connection_that_the_collector_closed_is_opened_again() -> None:
    with http_collector() as collector:
        port = int(collector.url.rpartition(":")[2])
        sender = exporter(read_variables(variables(collector.url)).target)
        sender.send(b"")
        collector.close_connections()
    with http_collector(port) as later:
        assert sender.send(b"") == b""
        sender.close()
        assert len(later.bodies) == 1


@pytest.mark.parametrize("start", [b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n", b""])
def test_collector_that_sends_a_byte_now_and_then_is_given_up(start: bytes) -> None:
    """Each byte comes within the timeout, and the whole answer never does."""
    ended = threading.Event()

    def drip(server: socket.socket) -> None:
        with suppress(OSError), server.accept()[0] as connection:
            connection.sendall(start)
            while not ended.wait(0.05):
                connection.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as server:
        dripping = threading.Thread(target=drip, args=(server,))
        dripping.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        sender = exporter(read_variables(variables(url, TIMEOUT="500")).target)
        with pytest.raises(ExportError, match="no whole answer within") as failed:
            sender.send(b"")
        ended.set()
        dripping.join()
    assert failed.value.again


def test_collector_that_never_answers_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.plugins.tracing.gateway.tracer.CLOSE_S_MAX", 0.1)
    registry = MetricsRegistry(None, "test")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = read_variables(variables(f"http://127.0.0.1:{silent.getsockname()[1]}", TIMEOUT="20000")).target
        make = partial(encode, resource={}, worker_service="w")
        tracer = Tracer(exporter(target), make, registry)
        tracer.start()
        tracer.add(finished(1))
        connection, _ = silent.accept()  # the thread is within the export
        with connection:
            tracer.close()
            assert any(thread.name == "tracing" for thread in threading.enumerate())
