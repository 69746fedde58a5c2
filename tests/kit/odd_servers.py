"""Servers that break rules: bytes written by hand, half replies, slow replies, TLS, HTTP/2. Each is a thread."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

CERTIFICATES = Path(__file__).parents[1] / "integration" / "certificates"


class OddServer:
    """A listening server. `connections` counts those that it accepted; `requests` has the first bytes of each."""

    def __init__(self, listener: socket.socket) -> None:
        self.port: int = listener.getsockname()[1]
        self.connections = 0
        self.requests: list[bytes] = []
        self.ended = threading.Event()  # set at the end of the test: an answer that waits ends then

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def odd_server(answer: Callable[[OddServer, socket.socket], None], *, tls: bool = False) -> Iterator[OddServer]:
    """Answer each connection with `answer`, one after the other, then close it. It must not raise but OSError."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = OddServer(listener)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            server.connections += 1
            with suppress(OSError), connection:
                if tls:
                    connection = context.wrap_socket(connection, server_side=True)
                with connection:
                    answer(server, connection)

    thread = threading.Thread(target=serve, name="odd server", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(120)


def answering(*replies: bytes) -> Callable[[OddServer, socket.socket], None]:
    """Return an answer: each connection gets the next of `replies` after its request's head; the last one repeats."""
    left = list(replies)

    def answer(server: OddServer, connection: socket.socket) -> None:
        server.requests.append(read_request(connection))
        connection.sendall(left.pop(0) if len(left) > 1 else left[0])

    return answer


def read_request(connection: socket.socket) -> bytes:
    """Return a request's head and body, by its Content-Length; what came when the caller stops sending."""
    received = b""
    while b"\r\n\r\n" not in received:
        chunk = connection.recv(65536)
        if not chunk:
            return received
        received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    lengths = [line.partition(b":")[2] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    left = int(lengths[0]) - len(body) if lengths else 0
    while left > 0 and (chunk := connection.recv(65536)):
        received += chunk
        left -= len(chunk)
    return received


def http(body: bytes, status: str = "200 OK", **headers: str) -> bytes:
    """Return a reply that closes the connection."""
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body
