"""health: what keeps an installation from serving, as its supervisor sees it. A service manager's watchdog asks.

processes of each kind: does one run, or did one within DOWN_S_MAX? -> the HTTP port: does a gateway answer?
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import urlsplit

from millstream.services.supervisor.child import Child

#: longest time without a process of one kind: restarts after deaths wait 10 s at most
DOWN_S_MAX = 30.0
#: longest time for a gateway to accept a connection and answer
ANSWER_S_MAX = 10.0
_REQUEST = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"


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
