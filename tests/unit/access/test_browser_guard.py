"""What a page of another origin may have a browser do: nothing, unless it has a key or the settings name it."""

from __future__ import annotations

from collections import Counter

import pytest

from millstream.gateway.access.browser_guard import CROSS_ORIGIN, UNKNOWN_HOST, BrowserGuard
from millstream.gateway.access.gate import Gate
from millstream.services.allowed_hosts import AllowedHosts
from millstream.services.errors import Code, Failure

HOST = "127.0.0.1:8000"
EVIL = "https://evil.example"
PAGE = "https://app.example:8443"
ADMIN = b"Bearer the-admin-key"
NAVIGATION = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


def refusal(
    headers: dict[str, str],
    *,
    method: str = "POST",
    guard: BrowserGuard | None = None,
    gate: Gate | None = None,
    credential: bytes | None = None,
    keyless: bool = False,
) -> Failure | None:
    sent = {name.encode(): value.encode("latin-1") for name, value in ({"host": HOST} | headers).items()}
    known = guard or BrowserGuard()
    return known.refusal(method, sent, gate or Gate(), credential, keyless=keyless)


FORGED: dict[str, dict[str, str]] = {
    "another host": {"origin": EVIL},
    "another port": {"origin": "http://127.0.0.1:3000"},
    "no port": {"origin": "http://127.0.0.1"},
    "another name of this machine": {"origin": "http://localhost:8000"},
    "null": {"origin": "null"},
    "null, for the same origin": {"origin": "null", "sec-fetch-site": "same-origin"},
    "an extension": {"origin": "chrome-extension://127.0.0.1:8000"},
    "no scheme": {"origin": HOST},
    "empty": {"origin": ""},
    "broken": {"origin": "http://[broken"},
    "a page over another scheme": {"origin": f"http://{HOST}", "sec-fetch-site": "cross-site"},
    "an image": {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"},
    "a page of the same site": {"sec-fetch-site": "same-site", "sec-fetch-mode": "cors"},
    "a frame": NAVIGATION | {"sec-fetch-dest": "iframe"},
    "an unknown site": {"sec-fetch-site": "elsewhere"},
    "an empty host": {"host": "", "origin": "http://"},
}


@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS", "DELETE"])
@pytest.mark.parametrize("case", FORGED)
def test_a_page_of_another_origin_is_refused(case: str, method: str) -> None:
    failure = refusal(FORGED[case], method=method)
    assert failure is not None
    assert failure.code is Code.FORBIDDEN
    assert "web pages of another origin" in failure.message


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"origin": f"http://{HOST}"},
        {"origin": f"HTTP://{HOST}"},
        {"origin": "http://localhost", "host": "LOCALHOST:80"},
        {"origin": "https://localhost", "host": "localhost:443"},
        {"origin": "https://localhost:443", "host": "localhost"},
        {"origin": "http://[::1]:8000", "host": "[::1]:8000"},
        {"origin": "https://models.example", "sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
    ],
)
def test_a_page_of_this_server_and_a_program_may_call(headers: dict[str, str]) -> None:
    assert refusal(headers) is None


def test_a_request_without_host_is_no_browsers() -> None:
    assert BrowserGuard().refusal("POST", {}, Gate(), None) is None
    failure = BrowserGuard().refusal("POST", {b"origin": EVIL.encode()}, Gate(), None)
    assert failure is not None


def test_a_link_on_another_page_may_be_followed_and_no_form_sent() -> None:
    assert refusal(NAVIGATION, method="GET") is None
    assert refusal(NAVIGATION, method="POST") is not None
    assert refusal(NAVIGATION | {"origin": EVIL}, method="GET") is not None


def test_a_page_of_a_named_origin_may_call() -> None:
    guard = BrowserGuard([PAGE])
    for site in ({}, {"sec-fetch-site": "cross-site"}):
        assert refusal({"origin": PAGE.upper(), **site}, guard=guard) is None
        assert refusal({"origin": EVIL, **site}, guard=guard) is not None
        assert refusal({"origin": "null", **site}, guard=guard) is not None


@pytest.mark.parametrize("case", FORGED)
def test_where_all_origins_may_call_none_is_refused(case: str) -> None:
    assert refusal(FORGED[case], guard=BrowserGuard(["*"])) is None


def test_a_page_that_rebinds_its_name_is_refused() -> None:
    for headers in ({"host": "evil.example"}, {"host": "evil.example:8000", "origin": "http://evil.example:8000"}):
        failure = refusal(headers, method="GET")
        assert failure is not None
        assert "MILLSTREAM_ALLOWED_HOSTS" in failure.message
    guard = BrowserGuard(hosts=AllowedHosts(["models.example"]))
    assert refusal({"host": "models.example"}, guard=guard) is None


def test_where_calls_need_keys_any_host_will_do() -> None:
    gate = Gate()
    gate.load([], others=True)
    assert gate.enforced
    assert refusal({"host": "models.example"}, gate=gate) is None
    assert refusal({"host": "models.example"}, gate=gate, keyless=True) is not None
    assert refusal({"host": "models.example", "origin": EVIL}, gate=gate) is not None


def test_a_call_with_a_right_key_is_no_pages() -> None:
    gate = Gate("the-admin-key")
    for headers in ({"origin": EVIL}, {"host": "evil.example"}):
        assert refusal(headers, gate=gate, credential=ADMIN) is None
        assert refusal(headers, gate=gate, credential=b"Bearer wrong") is not None
        assert refusal(headers, gate=gate) is not None
        assert refusal(headers, gate=Gate(), credential=ADMIN) is not None


def test_refusals_are_counted_by_reason() -> None:
    counted: Counter[str] = Counter()
    guard = BrowserGuard(count=lambda reason: counted.update([reason]))
    for headers in ({"origin": EVIL}, {"host": "evil.example"}, {"host": "two.example", "origin": EVIL}, {}):
        refusal(headers, guard=guard)
    assert counted == {CROSS_ORIGIN: 2, UNKNOWN_HOST: 1}


def test_a_message_quotes_a_part_of_a_long_header() -> None:
    failure = refusal({"host": "x" * 10_000})
    assert failure is not None
    assert len(failure.message) < 500
