"""Whether a Host header names this server, or perhaps a web page that rebinds its name; whose pages may call. Pure.

A page of evil.example may have that name resolve to 127.0.0.1 after it was loaded (DNS rebinding). For the browser this
server is then a part of the page's own site: the page may call it and read its replies, and sends no header that says
so, except Host with its own name. So a name counts only if no stranger can own it in the public DNS.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

ANY = "*"
VERDICTS_MAX = 1024  # headers whose verdict is remembered; beyond, all are forgotten
HOST_BYTES_MAX = 262  # a name has 253 (RFC 1035), then a dot and a port; no verdict on a longer header is kept
_LABEL = r"[a-z0-9_-]{1,63}"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
_PATTERN = re.compile(rf"(\*\.)?{_NAME.pattern}")
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(:[0-9]{1,5})?")
_ADDRESS = re.compile(r"\[[0-9a-f:.]+\](:[0-9]*)?")
#: Last labels of IPv4 addresses, also of their odd forms. Source: WHATWG URL, "ends in a number".
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
#: Top-level names that the public DNS never has: RFC 6761 (localhost), RFC 6762 (local), ICANN board resolution
#: 2024.07.29.06 (internal). svc is that of Kubernetes services; the DNS root has no svc.
_PRIVATE = frozenset({"localhost", "local", "internal", "svc"})


def parse_hosts(text: str) -> list[str]:
    """Return the names in `text`, which separates them by commas. Raises ValueError for text that is no name."""
    patterns = [part.strip().lower() for part in text.split(",") if part.strip()]
    for pattern in patterns:
        if pattern != ANY and not _PATTERN.fullmatch(pattern):
            raise ValueError(f"'{pattern[:64]}' is no host: write a name without a port, *.NAME for all below it, or *")
    return patterns


class AllowedHosts:
    """The names of one server: patterns as `parse_hosts` returns them, and names of the machine and its address."""

    def __init__(self, patterns: Sequence[str] = (), names: Iterable[str] = ()) -> None:
        self._any = ANY in patterns
        self._names = frozenset(
            {*(name.lower().removesuffix(".") for name in names), *(one for one in patterns if one[:1] != ANY)}
        )
        self._suffixes = tuple(pattern[1:] for pattern in patterns if pattern.startswith("*."))
        self._verdicts: dict[bytes, bool] = {}

    def allow(self, host: bytes) -> bool:
        """Whether the Host header `host` is none that a web page of a stranger can send."""
        verdict = self._verdicts.get(host)
        if verdict is None:
            verdict = self._any or self._is_ours(host.decode("latin-1").strip().lower())
            if len(host) <= HOST_BYTES_MAX:
                if len(self._verdicts) >= VERDICTS_MAX:
                    self._verdicts.clear()
                self._verdicts[host] = verdict
        return verdict

    def _is_ours(self, host: str) -> bool:
        if host.startswith("["):
            return _ADDRESS.fullmatch(host) is not None
        name = host.partition(":")[0].removesuffix(".")
        if not name:
            return True  # browsers always send a name
        if not _NAME.fullmatch(name):
            return False
        _, dot, last = name.rpartition(".")
        if not dot or last in _PRIVATE or _NUMBER.fullmatch(last):
            return True
        return name in self._names or name.endswith(self._suffixes)


def parse_origins(text: str) -> list[str]:
    """Return the origins in `text`, which separates them by commas. Raises ValueError for text that is no origin."""
    origins = [part.strip().lower() for part in text.split(",") if part.strip()]
    for origin in origins:
        if origin != ANY and not _ORIGIN.fullmatch(origin):
            raise ValueError(f"'{origin[:64]}' is no origin: write https://HOST or https://HOST:PORT, no path, or *")
    if ANY in origins and len(origins) > 1:
        raise ValueError("* stands for all origins: give it alone")
    return origins
