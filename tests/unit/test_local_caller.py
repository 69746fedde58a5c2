"""Which callers count as on this machine."""

from __future__ import annotations

import pytest

from millstream.gateway.protocols.http.local_caller import forwarding_header, is_loopback


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", "localhost", "LOCALHOST"])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "10.0.0.1", "::ffff:10.0.0.1", "localhost.example", "127.0.0.1.example", "fe80::1"]
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize(
    "name",
    ["Via", "forwarded", "X-Forwarded-For", "x-forwarded-anything", "X_Forwarded_For", "X-Real-IP", "CF-Connecting-IP"],
)
def test_a_header_that_only_a_proxy_adds(name: str) -> None:
    assert forwarding_header(["host", "accept", name]) == name


def test_what_clients_send_themselves_is_no_sign_of_a_proxy() -> None:
    names = ["host", "user-agent", "accept", "connection", "x-request-id", "traceparent", "authorization", "x-api-key"]
    assert forwarding_header(names) is None
