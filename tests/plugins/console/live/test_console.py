"""The console's server: its page, the session of a browser, and what each key sees."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

from tests.kit import models
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

PROOF = {"x-millstream-console": "1"}
DATA = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A server of this file alone: once there was a key, each call needs one."""
    with running_stack(tmp_path_factory.mktemp("console"), gateways=2) as started:
        yield started


@contextmanager
def browser(stack: Stack, key: str | None = None) -> Iterator[httpx2.Client]:
    """A client that keeps cookies, as a browser does, signed in with a key."""
    with httpx2.Client(base_url=stack.url, trust_env=False, timeout=60) as client:
        if key is not None:
            assert client.post("/console/api/session", json={"key": key}).status_code == 204
        yield client


@contextmanager
def made_key(stack: Stack, name: str, scopes: list[str]) -> Iterator[str]:
    made = stack.http.post("/admin/v1/keys", json={"name": name, "scopes": scopes})
    assert made.status_code == 201, made.text
    try:
        yield made.json()["key"]
    finally:
        stack.http.delete(f"/admin/v1/keys/{name}")


def samples(reply: httpx2.Response) -> Iterator[dict[str, Any]]:
    """Yield the data of the events `overview`."""
    event = ""
    for line in reply.iter_lines():
        if line.startswith("event: "):
            event = line.removeprefix("event: ")
        elif line.startswith("data: ") and event == "overview":
            yield json.loads(line.removeprefix("data: "))


def test_a_browser_signs_in_and_out(stack: Stack) -> None:
    with browser(stack) as client:
        assert client.get("/console/api/session").json()["signed_in"] is False
        wrong = client.post("/console/api/session", json={"key": "mt_wrong"})
        assert (wrong.status_code, wrong.headers.get("set-cookie"), "\n" in wrong.text) == (401, None, False)
        right = client.post("/console/api/session", json={"key": stack.key})
        cookie = right.headers["set-cookie"]
        assert "HttpOnly; SameSite=Strict" in cookie
        assert "path" not in cookie.lower(), "below the path of a proxy, the browser takes that of the call"
        assert "Secure" not in cookie
        session = client.get("/console/api/session").json()
        assert (session["signed_in"], all(session["can"].values())) == (True, True)
        assert client.get("/console/api/call/admin/v1/models").status_code == 200
        assert client.delete("/console/api/session", headers=PROOF).status_code == 204
        assert client.get("/console/api/call/admin/v1/models").status_code == 401


def test_the_cookie_of_a_page_over_tls_is_secure(stack: Stack) -> None:
    """Also where a proxy ends TLS: the page's origin says so."""
    headers = {"origin": "https://models.example", "sec-fetch-site": "same-origin"}
    with browser(stack) as client:
        reply = client.post("/console/api/session", json={"key": stack.key}, headers=headers)
        assert (reply.status_code, "; Secure" in reply.headers["set-cookie"]) == (204, True)


@pytest.mark.parametrize(
    ("method", "headers"),
    [
        ("POST", {}),
        ("POST", {"x-millstream-console": "0"}),
        ("POST", PROOF | {"origin": "http://other.example"}),
        ("POST", PROOF | {"sec-fetch-site": "same-site"}),
        ("GET", {"sec-fetch-site": "same-site"}),
        ("GET", {"origin": "http://127.0.0.1:1"}),
        ("DELETE", {}),
    ],
)
def test_the_cookie_counts_for_its_own_page_alone(stack: Stack, method: str, headers: dict[str, str]) -> None:
    with browser(stack, stack.key) as client:
        for path in ("call/admin/v1/keys", "session"):
            reply = client.request(method, f"/console/api/{path}", headers=headers)
            assert reply.status_code == 403, (path, reply.text)
            assert "cookie" in reply.json()["error"]
        assert client.get("/admin/v1/keys").status_code == 401, "it counts below /console/api alone"
        assert client.get("/console/api/call/admin/v1/keys").status_code == 200


def test_no_other_page_signs_a_browser_in(stack: Stack) -> None:
    """Else its owner would see, and may offer, what a visitor does with a key of the owner."""
    with browser(stack) as client:
        for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "http://other.example"}, {"origin": "null"}):
            reply = client.post("/console/api/session", json={"key": stack.key}, headers=headers)
            assert (reply.status_code, reply.headers.get("set-cookie")) == (403, None)


def test_of_two_cookies_none_counts(stack: Stack) -> None:
    """Another server of this host, or of a host below the same name, can set one for a longer path."""
    for cookies in (f"a=b; millstream_console={stack.key}; millstream_console=mt_other", "millstream_console="):
        with browser(stack) as client:
            reply = client.get("/console/api/call/admin/v1/models", headers={"cookie": cookies})
            assert reply.status_code == 401


def test_a_changed_scope_reaches_an_open_stream(stack: Stack, tmp_path: Path) -> None:
    for name in ("before", "after"):
        stack.push(name, models.scale(tmp_path / f"{name}.onnx", 2.0, 4))
    with (
        made_key(stack, "changing", ["models:read:before"]) as key,
        browser(stack, key) as client,
        client.stream("GET", "/console/api/events") as reply,
    ):
        found = samples(reply)
        first = next(sample for sample in found if sample["endpoints"])
        assert {one["model"] for one in first["endpoints"]} == {"before"}
        changed = stack.http.patch("/admin/v1/keys/changing", json={"scopes": ["models:read:after"]})
        assert changed.status_code == 200, changed.text
        assert any({one["model"] for one in sample["endpoints"]} == {"after"} for sample in found)
    for name in ("before", "after"):
        stack.http.delete(f"/admin/v1/models/{name}")


def test_a_head_request_for_the_stream_ends(stack: Stack) -> None:
    with browser(stack, stack.key) as client:
        assert client.head("/console/api/events").status_code in {200, 405}


def test_any_api_is_called_with_the_cookie(stack: Stack, tmp_path: Path) -> None:
    stack.push("called", models.scale(tmp_path / "called.onnx", 2.0, 4))
    with browser(stack, stack.key) as client:
        reply = client.post("/console/api/call/v2/models/called/infer", json=DATA, headers=PROOF)
        assert reply.json()["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0]
        assert client.get("/console/api/call/admin/v1/models", params={"limit": "1"}).json()["models"]
        answered = client.get("/console/api/call/admin/v1/keys/a%2Fb")
        assert answered.status_code == 400, "paths are checked as without the console"
        assert client.get("/console/api/call/nothing").status_code == 404
    stack.http.delete("/admin/v1/models/called")


def test_a_reader_of_one_model_sees_it_alone(stack: Stack, tmp_path: Path) -> None:
    for name in ("mine", "theirs"):
        stack.push(name, models.scale(tmp_path / f"{name}.onnx", 2.0, 4))
    with made_key(stack, "one-reader", ["models:read:mine"]) as key, browser(stack, key) as client:
        can = client.get("/console/api/session").json()["can"]
        assert can == dict.fromkeys(("watch", "read"), True) | dict.fromkeys(
            ("write", "keys", "infer", "metrics"), False
        )
        nothing = client.get("/console/api/requests").json()
        assert (nothing["slowest"], nothing["failed"]) == ([], [])
        with client.stream("GET", "/console/api/events") as reply:
            for sample in samples(reply):
                for name in ("mine", "theirs"):
                    assert stack.http.post(f"/v2/models/{name}/infer", json=DATA).status_code == 200
                assert {one["model"] for one in sample["endpoints"]} <= {"mine"}
                assert sample["totals"]["in_flight"] is None
                if any(one["requests_per_s"] for one in sample["endpoints"]):
                    break
        seen = client.get("/console/api/requests").json()
        assert {one["model"] for one in seen["slowest"]} <= {"mine"}
        assert {one["key"] for one in seen["slowest"]} <= {""}
        assert client.get("/console/api/history", params={"model": "mine"}).status_code == 200
        assert client.get("/console/api/history", params={"model": "theirs"}).status_code == 403
        assert client.get("/console/api/logs").status_code == 403
        assert client.get("/console/api/events", params={"logs": "1"}).status_code == 403
    for name in ("mine", "theirs"):
        stack.http.delete(f"/admin/v1/models/{name}")


def test_a_revoked_key_ends_its_stream(stack: Stack) -> None:
    with made_key(stack, "leaver", ["models:read"]) as key, browser(stack, key) as client:
        with client.stream("GET", "/console/api/events") as reply:
            found = samples(reply)
            next(found)
            stack.http.delete("/admin/v1/keys/leaver")
            assert sum(1 for _ in found) < 100, "the stream ends"
        assert client.get("/console/api/events").status_code == 401
        assert client.get("/console/api/session").json()["signed_in"] is False


def test_log_lines_are_found_and_stay_data(stack: Stack) -> None:
    hostile = "<img src=x onerror=alert(1)>\n2026-01-01 00:00:00,000 ERROR forged: line"
    headers = {"x-request-id": "looked-for"}
    stack.http.post("/admin/v1/models/x/versions", params={"alias": hostile}, content=b"x", headers=headers)
    stack.http.delete(f"/admin/v1/models/{quote(hostile)}", headers=headers)

    def found() -> list[dict[str, Any]]:
        reply = stack.http.get("/console/api/logs", params={"text": "looked-for", "level": "warning"})
        assert reply.headers["content-type"] == "application/json"
        assert reply.headers["x-content-type-options"] == "nosniff"
        lines: list[dict[str, Any]] = reply.json()["lines"]
        return lines

    [line, *_] = wait_until(found)
    assert (line["level"], line["process"][:8]) == ("WARNING", "gateway-")
    assert not [one for one in found() if one["text"].startswith("forged")]
    assert (
        stack.http.get("/console/api/logs", params={"before": line["at"], "text": "looked-for"}).json()["lines"] == []
    )
    everything = stack.http.get("/console/api/logs").json()
    assert {"gateway-0", "redis", "supervisor"} <= set(everything["processes"])
    assert [one["at"] for one in everything["lines"]] == sorted(one["at"] for one in everything["lines"])


def test_the_page_and_its_files(stack: Stack) -> None:
    with browser(stack) as client:
        assert client.get("/console").headers["location"] == "console/"
        assert client.get("/", headers={"accept": "text/html"}).headers["location"] == "console/"
        assert client.get("/").json() == {"status": "alive"}
        page = client.get("/console/")
        assert "default-src 'none'; script-src 'self'" in page.headers["content-security-policy"]
        assert page.headers["cache-control"] == "no-cache"
        name = page.text.partition('src="./assets/')[2].partition('"')[0]
        plain = client.get(f"/console/assets/{name}", headers={"accept-encoding": "identity"})
        assert "immutable" in plain.headers["cache-control"]
        assert plain.headers["content-type"].startswith("text/javascript")
        with client.stream("GET", f"/console/assets/{name}", headers={"accept-encoding": "gzip"}) as packed:
            assert packed.headers["content-encoding"] == "gzip"
            assert gzip.decompress(b"".join(packed.iter_raw())) == plain.content
        head = client.head(f"/console/assets/{name}", headers={"accept-encoding": "identity"})
        assert (head.headers["content-length"], head.content) == (str(len(plain.content)), b"")
        for wrong in ("no.js", f"{name}.gz", "%2e%2e", "%2e%2e%2findex.html", "..%2f..%2fplugin.py", ""):
            assert client.get(f"/console/assets/{wrong}").status_code in {400, 404}, wrong


@contextmanager
def stalled_viewer(stack: Stack) -> Iterator[None]:
    """A viewer that asks for log lines and reads the first of them alone, while megabytes are sent."""
    folder = stack.home / "logs"
    line = f"2026-01-01 00:00:00,000 INFO test: {'x' * 8000}\n" * 31
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", stack.port))
        head = (
            f"GET /console/api/events?logs=1 HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {stack.key}\r\n\r\n"
        )
        connection.sendall(head.encode())
        seen = b""
        while b"event: overview" not in seen:
            seen += connection.recv(1024)
        for number in range(16):
            (folder / f"test-{number}.log").write_text(line)
        while b"event: log" not in seen:
            seen = seen[-20:] + connection.recv(1024)
        yield


def test_a_drain_does_not_wait_for_those_who_look(tmp_path: Path) -> None:
    """Neither for one that reads, nor for one that does not: without the abort it would hold its connection."""
    settings = {"drain_s": 120, "drain_delay_s": 0, "client_stall_s_max": 3600}
    with running_stack(tmp_path, settings=settings) as stack:
        with browser(stack, stack.key) as client, client.stream("GET", "/console/api/events") as reply:
            found = samples(reply)
            next(found)
            with stalled_viewer(stack):
                assert stack.stop() == 0
                assert sum(1 for _ in found) < 100, "the stream ends in order"
        assert "0 connections were aborted" in stack.logs()
