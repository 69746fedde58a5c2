"""A TCP proxy on loopback that can go away and come back at the same port, and lose a connection without a word."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import suppress


class TcpProxy:
    """Forwards connections to HOST:PORT while it is open.

    `up_bytes_s`: limit of each connection, to the server; 0: none.
    """

    def __init__(self, server: str, up_bytes_s: int = 0) -> None:
        self._up_bytes_s = up_bytes_s
        host, _, port = server.rpartition(":")
        self._server = (host, int(port))
        self._port = 0
        self._open_sockets: list[socket.socket] = []
        self._silent: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.open()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    def open(self) -> None:
        """Accept connections, at the same port as before."""
        self._listener = socket.create_server(("127.0.0.1", self._port))
        self._port = self._listener.getsockname()[1]
        self._start(self._accept, self._listener)

    def close(self) -> None:
        """Refuse connections and end those that there are."""
        for one in (self._listener, *self._open_sockets):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for one in (self._listener, *self._open_sockets):
            one.close()
        self._open_sockets, self._threads = [], []

    def silence(self, connection: int) -> None:
        """Drop from now on what either end of the n-th connection sends, as a lost route does: no end is closed."""
        self._silent.update(self._open_sockets[2 * connection : 2 * connection + 2])

    def _start(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client = listener.accept()[0]
                self._open_sockets.append(client)
                server = socket.create_connection(self._server)
                self._open_sockets.append(server)
                self._start(self._forward, client, server, self._up_bytes_s)
                self._start(self._forward, server, client, 0)

    def _forward(self, source: socket.socket, sink: socket.socket, bytes_s: int) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if bytes_s:
                    time.sleep(len(data) / bytes_s)
                if source not in self._silent:
                    sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
