"""A real HTTP server on a free port, and clients on bare sockets: the test writes and sees every byte."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple, Self

import uvicorn

PATIENCE_S = 120.0  # a test that waits this long has failed
_BUSY_POLLS = 1000  # without a pause, so that short-lived states are seen; a longer wait leaves the processor to others
_PAUSE_S = 0.001
#: lines that differ from reply to reply: the date, and an id that the server made
_DIFFERING = re.compile(rb"\r\n(?:date: [^\r]+|x-request-id: [0-9a-f]{12}-[0-9a-f]+(?=\r))")


class WireReply(NamedTuple):
    """A received reply. `head` is everything before the body, except the date and an id that the server made.

    `headers` lack the date, too.
    """

    status: int
    headers: dict[bytes, bytes]
    body: bytes
    head: bytes


class Wire:
    """A client with one connected socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._read = bytearray()

    @classmethod
    async def connect(cls, port: int, *, receive_bytes: int | None = None) -> Self:
        """Connect; a small `receive_bytes` (receive buffer) makes a client that reads slowly. Raises OSError."""
        sock = socket.socket()
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if receive_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
            wire = cls(sock)
            await wire.begin()
        except BaseException:
            sock.close()
            raise
        return wire

    async def begin(self) -> None:
        """Do what comes before the first request."""

    async def send(self, *segments: bytes) -> None:
        """Send each segment in its own packet, as far as a sender can. Raises OSError if the server is gone."""
        for segment in segments:
            async with asyncio.timeout(PATIENCE_S):
                await self._loop.sock_sendall(self._sock, segment)

    @asynccontextmanager
    async def sending(self, *segments: bytes) -> AsyncIterator[asyncio.Task[None]]:
        """Send while the block runs, since the server may not accept all of it; yields the task."""
        task = asyncio.create_task(self.send(*segments))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def reply(self, *, head: bool = False) -> WireReply:
        """Return the next reply, also a 100 Continue; with `head` it has no body. Raises EOFError."""
        while b"\r\n\r\n" not in self._read:
            await self._more()
        top = self._take(self._read.index(b"\r\n\r\n"))
        self._take(4)
        status, *lines = top.split(b"\r\n")
        headers = dict(line.split(b": ", 1) for line in lines)
        headers.pop(b"date", None)
        length = 0 if head else int(headers.get(b"content-length", 0))
        while len(self._read) < length:
            await self._more()
        return WireReply(int(status.split()[1]), headers, self._take(length), _DIFFERING.sub(b"", top))

    async def rest(self) -> bytes:
        """Return all bytes until the server closes or resets the connection, without dates and ids that it made."""
        with suppress(EOFError, ConnectionError):
            while True:
                await self._more()
        return _DIFFERING.sub(b"", self._take(len(self._read)))

    def _take(self, count: int) -> bytes:
        taken = bytes(self._read[:count])
        del self._read[:count]
        return taken

    async def _more(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            received = await self._loop.sock_recv(self._sock, 65536)
        if not received:
            raise EOFError
        self._read += received

    def half_close(self) -> None:
        """Close the sending side of the connection."""
        self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._sock.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()


class Served(NamedTuple):
    """A server that runs in this event loop."""

    server: uvicorn.Server
    port: int
    running: asyncio.Task[None]

    @property
    def connections(self) -> set[Any]:
        """The protocols of the open connections."""
        return self.server.server_state.connections

    async def settled(self, connections: int) -> None:
        """Wait until exactly this many connections are open."""
        await until(lambda: len(self.connections) == connections)


async def until(true: Callable[[], bool]) -> None:
    """Wait until `true` holds; the server in the same event loop runs in between."""
    async with asyncio.timeout(PATIENCE_S):
        for polls in itertools.count():
            if true():
                return
            await asyncio.sleep(0 if polls < _BUSY_POLLS else _PAUSE_S)


@asynccontextmanager
async def serving(
    app: Any, http: Any, server_of: Callable[[uvicorn.Config], uvicorn.Server] = uvicorn.Server, **config: Any
) -> AsyncIterator[Served]:
    """Run uvicorn with a protocol class (or its name) on a free port until the end of the block; yields the server."""
    options = {"lifespan": "off", "access_log": False, "server_header": False, "timeout_keep_alive": 60, **config}
    server = server_of(uvicorn.Config(app, http=below(http), port=0, log_config=None, ws="none", **options))
    listener = server.config.bind_socket()
    listener.listen()  # connections before the server has started wait in the backlog
    running = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield Served(server, listener.getsockname()[1], running)
    finally:
        server.should_exit = True
        await asyncio.wait_for(running, PATIENCE_S)
        listener.close()


def below(http: Any) -> Any:
    """Return the protocol class of a server's connections: `http`. Tests over TLS replace this function."""
    return http


def post(path: str, body: bytes = b"", *headers: str, version: str = "1.1") -> bytes:
    """Return a POST with a Content-Length."""
    return request("POST", path, f"Content-Length: {len(body)}", *headers, version=version) + body


def request(method: str, path: str, *headers: str, version: str = "1.1") -> bytes:
    """Return the head of a request."""
    lines = [f"{method} {path} HTTP/{version}", "Host: test", *headers]
    return "\r\n".join([*lines, "", ""]).encode("latin-1")


def chunked(path: str, chunks: Iterable[bytes], *headers: str, end: bytes = b"0\r\n\r\n") -> bytes:
    """Return a POST with a chunked body."""
    head = request("POST", path, "Transfer-Encoding: chunked", *headers)
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + end
