"""Refuses requests that a browser sends for a web page of another origin. Pure.

Origin, Sec-Fetch-Site ─> is the page of another origin?   ─> refused (forged requests)
Host                   ─> is it a name of this server?     ─> refused while calls need no key (DNS rebinding)

A browser sends the requests of any page to any address, also to 127.0.0.1, and says from which page they come. Pages
cannot change these headers. Only reading is held back until the server agrees (CORS); a request that changes something
has then been made. A call with a right key always passes: no browser adds a key by itself.

Sources: WHATWG Fetch ("Origin header"); W3C Fetch Metadata; the order of the checks is that of Go's
net/http.CrossOriginProtection, except that reads of other origins are refused, too. Many HTTP/1.0 clients send no Host,
and browsers always do, so a request without one is no browser's. The target of a request may have an authority, too;
browsers send one to proxies alone, and always the one that is in Host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from millstream.gateway.access.gate import Gate
from millstream.services.allowed_hosts import ANY, AllowedHosts
from millstream.services.errors import Code, Failure

Sent = Mapping[bytes, bytes]
"""The headers of a request, names in lower case."""

CROSS_ORIGIN, UNKNOWN_HOST = "cross_origin", "unknown_host"  # reasons of refusals, for the log
_QUOTED_CHARACTERS_MAX = 262  # of a header in a message
_OWN_PAGE = frozenset({b"same-origin", b"none"})  # none: the user typed the address
_DEFAULT_PORTS = {b"http": b":80", b"https": b":443"}


class BrowserGuard:
    """The check of one gateway. `origins`: as `parse_origins` returns them; `count`: takes the reason of a refusal."""

    def __init__(
        self,
        origins: Sequence[str] = (),
        hosts: AllowedHosts | None = None,
        count: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._any_origin = ANY in origins
        self._origins = frozenset(origin.encode() for origin in origins)
        self._hosts = hosts or AllowedHosts()
        self._count = count

    def refusal(
        self, method: str, sent: Sent, gate: Gate, credential: bytes | None, *, keyless: bool = False
    ) -> Failure | None:
        """Return why a request is refused; None: it is not.

        Where `gate` asks for keys, a page that rebinds its name has none; `keyless`: the call needs no key all the
        same.
        """
        reason, failure = CROSS_ORIGIN, self.page_fault(method, sent)
        if failure is None and (keyless or not gate.enforced):
            reason, failure = UNKNOWN_HOST, self.host_fault(sent)
        if failure is None or (credential is not None and gate.refusal_of(credential) is None):
            return None
        self._count(reason)
        return failure

    def page_fault(self, method: str, sent: Sent) -> Failure | None:
        """Return the refusal of a request of a page of another origin; None: it is of no such page."""
        origin, site = sent.get(b"origin"), sent.get(b"sec-fetch-site")
        if (origin is None and site is None) or self._any_origin:
            return None
        if origin is None:
            if site in _OWN_PAGE or (method == "GET" and _is_link(sent)):
                return None
            shown = b"Sec-Fetch-Site: " + (site or b"")
        elif origin.lower() in self._origins:
            return None
        else:
            # Behind a proxy that sends its own Host, only the browser knows whether the origin is the same.
            if origin != b"null" and (site in _OWN_PAGE if site is not None else _is_same(origin, sent.get(b"host"))):
                return None
            shown = origin
        return _forbidden(
            f"calls of web pages of another origin are refused ({_quoted(shown)}): name it in MILLSTREAM_CORS_ORIGINS "
            "if its pages may call"
        )

    def host_fault(self, sent: Sent) -> Failure | None:
        """Return the refusal of a request whose Host may be a name of a stranger's page; None: it is none."""
        host = sent.get(b"host")
        if host is None or self._hosts.allow(host):
            return None
        return _forbidden(
            f"Host '{_quoted(host)}' is not known as a name of this server: call its address, send a right key, or "
            "name it in MILLSTREAM_ALLOWED_HOSTS"
        )


def _is_link(sent: Sent) -> bool:
    """Whether the browser opens a page because a link was followed: the page with the link cannot read it."""
    return sent.get(b"sec-fetch-mode") == b"navigate" and sent.get(b"sec-fetch-dest") == b"document"


def _is_same(origin: bytes, host: bytes | None) -> bool:
    """Whether the host and port of an origin are those in Host. The scheme is not known behind a proxy for TLS."""
    scheme, _, authority = origin.lower().partition(b"://")
    port = _DEFAULT_PORTS.get(scheme)
    if port is None or host is None:
        return False
    return authority.removesuffix(port) == host.strip().lower().removesuffix(port) != b""


def _quoted(header: bytes) -> str:
    return header[:_QUOTED_CHARACTERS_MAX].decode("latin-1")


def _forbidden(message: str) -> Failure:
    return Failure(Code.FORBIDDEN, message)
