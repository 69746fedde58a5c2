"""Tells the service manager what the supervisor does: sd_notify(3), datagrams to the socket in NOTIFY_SOCKET.

READY=1 when the installation serves, STOPPING=1, RELOADING=1 during a rolling restart, STATUS=… for people, and
WATCHDOG=1 in half of the interval that the manager asks for, as long as Health finds no problem: processes of each kind
run, and a gateway answers. Without NOTIFY_SOCKET nothing is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from urllib.parse import urlsplit

from millstream.services.process.printable import printable
from millstream.services.supervisor.child import Child
from millstream.services.supervisor.own_log import LOGGER

log = logging.getLogger(LOGGER)

STATUS_CHARACTERS_MAX = 200
#: pings for each interval of the watchdog: sd_watchdog_enabled(3) recommends two
PINGS = 2
#: longest time without a process of one kind: restarts after deaths wait 10 s at most
DOWN_S_MAX = 30.0
#: longest time for a gateway to accept a connection and answer
ANSWER_S_MAX = 10.0
_REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


class ServiceManager:
    """The service manager that started this process; one that does nothing where there is none.

    Args:
        environment: that of this process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._address = _address(environment.get("NOTIFY_SOCKET", ""))
        self._watchdog_s = _watchdog_s(environment) if self._address else 0.0
        self._task: asyncio.Task[None] | None = None

    def ready(self, status: str) -> None:
        """Tell that the start, or a reload, is complete."""
        self._send("READY=1", f"STATUS={_line(status)}")

    def reloading(self, status: str) -> None:
        # MONOTONIC_USEC is what Type=notify-reload compares with the time of its signal.
        self._send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}", f"STATUS={_line(status)}")

    def stopping(self, status: str) -> None:
        self._send("STOPPING=1", f"STATUS={_line(status)}")

    def start_watchdog(self, problem: Callable[[], Awaitable[str]]) -> None:
        """Send pings from now on, unless `problem` returns one. Must be called in a running event loop."""
        if self._watchdog_s:
            self._task = asyncio.create_task(self._ping(problem), name="watchdog of the service manager")

    async def close(self) -> None:
        """End the pings."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _ping(self, problem: Callable[[], Awaitable[str]]) -> None:
        before = ""
        while True:
            found = await problem()
            if found != before:
                log.warning(
                    "%s", f"the watchdog is not answered: {found}" if found else "the watchdog is answered again"
                )
                self._send(f"STATUS={_line(found) or 'serving again'}")
                before = found
            if not found:
                self._send("WATCHDOG=1")
            await asyncio.sleep(self._watchdog_s / PINGS)

    def _send(self, *lines: str) -> None:
        if self._address is None:
            return
        # A manager that is gone, or whose socket is full, must not stop the installation.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
            to.setblocking(False)
            to.sendto("\n".join(lines).encode("utf-8", "backslashreplace"), self._address)


def _address(name: str) -> bytes | None:
    """Return the address of a socket: a path, or `@NAME` for an abstract socket; None if there is no usable one."""
    if name.startswith("@"):
        return b"\0" + os.fsencode(name[1:])
    return os.fsencode(name) if name.startswith("/") else None


def _watchdog_s(environment: Mapping[str, str]) -> float:
    """Return the interval in which the manager expects pings of this process; 0: it expects none."""
    pid = environment.get("WATCHDOG_PID", str(os.getpid()))
    interval = environment.get("WATCHDOG_USEC", "0")
    return int(interval) / 1e6 if interval.isdecimal() and pid == str(os.getpid()) else 0.0


def _line(text: str) -> str:
    return printable(text[:STATUS_CHARACTERS_MAX])


class Health:
    """Examines an installation.

    Args:
        url: HTTP URL of its gateways on this machine; "" if there are none.
        children: returns its processes by kind.
    """

    def __init__(self, url: str, children: Callable[[], Mapping[str, Sequence[Child]]]) -> None:
        parts = urlsplit(url)
        self._tls = _unverified() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port
        self._children = children
        self._seen_s: dict[str, float] = {}  # when a process of a kind was last seen running

    async def problem(self) -> str:
        """Return what is wrong; empty if nothing is."""
        now = asyncio.get_running_loop().time()
        for kind, children in self._children().items():
            if not children or any(child.pid for child in children):
                self._seen_s[kind] = now
            elif now - self._seen_s.setdefault(kind, now) > DOWN_S_MAX:
                return f"no {kind} has run for {DOWN_S_MAX:g} s"
        if self._host is None:
            return ""
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                await self._ask()
        except TimeoutError:
            return f"no gateway answers within {ANSWER_S_MAX:g} s"
        except OSError as error:
            return f"no gateway can be reached: {error.strerror or error}"
        return ""

    async def _ask(self) -> None:
        """Return when a gateway answered or, full of connections, closed this one."""
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
            try:
                writer.write(_REQUEST)
                await reader.read(1)
            finally:
                writer.transport.abort()
        except ssl.SSLError:
            return  # it answered that clients need a certificate


def _unverified() -> ssl.SSLContext:
    """Return a context for questions whose answer does not count, only that there is one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
