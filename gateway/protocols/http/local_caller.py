"""local_caller: tells whether a request comes from this machine, or from a proxy on it. Pure.

A reverse proxy on this machine connects from loopback for clients on other machines. A proxy is recognised by the
headers that name its client, and nginx in its default configuration by HTTP/1.0.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

#: headers that only a proxy adds: RFC 9110 7.6.3 (Via), RFC 7239 (Forwarded), and those of the common proxies and CDNs.
_FORWARDING = frozenset(
    {
        "via",
        "forwarded",
        "x-real-ip",
        "x-client-ip",
        "x-cluster-client-ip",
        "true-client-ip",
        "cf-connecting-ip",
        "fastly-client-ip",
        "x-original-for",
        "x-original-host",
        "x-original-forwarded-for",
    }
)
_FORWARDING_PREFIXES = ("x-forwarded-", "x-envoy-", "x-proxyuser-")


def is_loopback(host: str) -> bool:
    """Whether `host` is localhost or a loopback address: IPv4, IPv6, or IPv4 mapped into IPv6."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def forwarding_header(names: Iterable[str]) -> str | None:
    """Return the first of the header `names`, upper or lower case, that only a proxy adds; None: there is none."""
    for name in names:
        lowered = name.lower().replace("_", "-")
        if lowered in _FORWARDING or lowered.startswith(_FORWARDING_PREFIXES):
            return name
    return None
