"""local_caller: whether a request really comes from this machine, or only its last hop does.

A reverse proxy on this machine connects from loopback for everybody on the internet. Proxies give themselves away by
the headers that name the client they speak for, and nginx in its default configuration by HTTP/1.0. Pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

#: Headers that only a proxy adds: RFC 9110 7.6.3 (Via), RFC 7239 (Forwarded), and those of the common proxies and CDNs.
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
    """Whether an address is this machine's own, whatever form it comes in."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def forwarding_header(names: Iterable[str]) -> str | None:
    """The first of the header `names` that only a proxy adds; None: there is none. Case does not matter."""
    for name in names:
        lowered = name.lower().replace("_", "-")
        if lowered in _FORWARDING or lowered.startswith(_FORWARDING_PREFIXES):
            return name
    return None
