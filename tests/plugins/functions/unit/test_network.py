"""A function that asks for the network connects, and can do nothing else that a confined one cannot."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.services.sandbox.confine import available
from tests.plugins.functions.served import answers, check, loaded, texts

pytestmark = pytest.mark.skipif(not available().stand, reason="nothing confines processes on this kernel")
ASKS = "# /// script\n# [tool.millstream]\n# network = true\n# ///\n"
FUNCTION = """
import os, socket, subprocess

def call(text: str) -> str:
    if text == "a":
        return text
    return str(eval(text))
"""


@pytest.fixture
def service() -> Iterator[tuple[int, list[bytes]]]:
    """A service on a loopback address that answers each connection, and what was sent to it."""
    seen: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    seen.append(connection.recv(100))
                    connection.sendall(b"pong")

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], seen
        server.shutdown(socket.SHUT_RDWR)


def call(tmp_path: Path, source: str, *expressions: str) -> list[str]:
    found = []
    with loaded(check(tmp_path, source)) as instance:
        for expression in expressions:
            try:
                ((answer,),) = answers(instance, {"text": texts(expression)})
                found.append(answer.decode())
            except Exception as error:
                found.append(str(error))
    return found


def connects(port: int) -> str:
    return f"(lambda s: (s.sendall(b'ping'), s.recv(9))[1])(socket.create_connection(('127.0.0.1', {port}), timeout=5))"


def test_who_asks_connects_and_who_does_not_is_told(tmp_path: Path, service: tuple[int, list[bytes]]) -> None:
    port, seen = service
    (denied,) = call(tmp_path, FUNCTION, connects(port))
    assert "Operation not permitted" in denied
    assert "functions have no network unless they ask" in denied
    assert not seen
    assert call(tmp_path, ASKS + FUNCTION, connects(port)) == ["b'pong'"]
    assert seen == [b"ping"]


def test_names_are_looked_up_and_datagrams_sent(tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as received:
        received.bind(("127.0.0.1", 0))
        received.settimeout(5)
        port = received.getsockname()[1]
        named, sent = call(
            tmp_path, ASKS + FUNCTION, f"socket.getaddrinfo('localhost', {port})[0][4][1]",
            f"socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'ping', ('127.0.0.1', {port}))",
        )  # fmt: skip
        assert (named, sent) == (str(port), "4")
        assert received.recv(100) == b"ping"


DENIED = [
    "socket.socket(socket.AF_UNIX)",
    "socket.socketpair()",
    "socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)",
    "socket.socket(socket.AF_PACKET, socket.SOCK_RAW)",
    "socket.socket(socket.AF_NETLINK, socket.SOCK_RAW)",
    "socket.create_server(('127.0.0.1', 0))",
    "socket.socket().listen()",
    "os.fork()",
    "subprocess.run(['/bin/true'])",
    "open('/etc/passwd').read()",
    "open('/proc/1/environ').read()",
    "os.kill(os.getppid(), 9)",
]


def test_nothing_else_is_allowed(tmp_path: Path) -> None:
    for expression, answer in zip(DENIED, call(tmp_path, ASKS + FUNCTION, *DENIED), strict=True):
        assert "PermissionError" in answer, (expression, answer)
