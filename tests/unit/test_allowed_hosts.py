"""Which Host headers name this server: none that a stranger's page can send."""

from __future__ import annotations

import pytest

from millstream.services.allowed_hosts import VERDICTS_MAX, AllowedHosts, parse_hosts

OURS = [
    b"127.0.0.1",
    b"127.0.0.1:8000",
    b"192.168.1.7:80",
    b"8.8.8.8",
    b"127.1",
    b"0x7f.1",
    b"10.0.0.1.",
    b"[::1]",
    b"[::1]:8000",
    b"[2001:DB8::7]:80",
    b"[::ffff:127.0.0.1]",
    b"localhost",
    b"LocalHost:8000",
    b"localhost.:8000",
    b"app.localhost",
    b"gateway",
    b"gateway:8000",
    b"my_service",
    b"millstream.default.svc",
    b"millstream.default.svc.cluster.local:8000",
    b"printer.local",
    b"vm.c.project.internal",
    b"",
    b":8000",
    b" localhost ",
]
STRANGERS = [
    b"evil.example",
    b"evil.example:8000",
    b"EVIL.example.",
    b"127.0.0.1.evil.example",
    b"localhost.evil.example",
    b"svc.evil.example",
    b"evil.local.example",
    b"evil.svcs",
    b"1.2.3.4.nip.io",
    b"xn--bcher-kva.example",
    b"a..b",
    b".localhost",
    b"evil.example..",
    b"evil%2eexample",
    b"[::1",
    b"[evil.example]",
    b"\xff\xfe",
    b"u@localhost",
    b"a" * 64,
    b"a." * 200 + b"example",
]


@pytest.mark.parametrize("host", OURS)
def test_no_stranger_owns_these(host: bytes) -> None:
    assert AllowedHosts().allow(host)


@pytest.mark.parametrize("host", STRANGERS)
def test_a_stranger_may_own_these(host: bytes) -> None:
    hosts = AllowedHosts(names=["machine.example", "gateway"])
    assert [hosts.allow(host) for _ in range(2)] == [False, False]


@pytest.mark.parametrize(
    ("text", "allowed", "refused"),
    [
        ("models.example.org", b"Models.Example.org:443", b"x.models.example.org"),
        ("*.example.org", b"a.b.example.org", b"example.org"),
        ("*.example.org", b"a.example.org.", b"evilexample.org"),
        ("one.example, TWO.example,", b"two.example", b"three.example"),
        ("*", b"evil.example", None),
        ("*", b"a..b", None),
    ],
)
def test_a_name_of_the_setting_is_ours(text: str, allowed: bytes, refused: bytes | None) -> None:
    hosts = AllowedHosts(parse_hosts(text))
    assert hosts.allow(allowed)
    assert refused is None or not hosts.allow(refused)


def test_the_names_of_the_machine_are_ours_and_not_those_below_them() -> None:
    hosts = AllowedHosts(names=["Box.Example.", "127.0.0.1"])
    assert hosts.allow(b"box.example:8000")
    assert not hosts.allow(b"evil.box.example")


@pytest.mark.parametrize(
    "text",
    ["http://a.example", "a.example:80", "a b", "*.*.example", "a*.example", "*example.org", "a..b", "ü.example"],
)
def test_a_setting_that_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no host"):
        parse_hosts(text)


def test_what_is_remembered_is_bounded() -> None:
    hosts = AllowedHosts()
    for number in range(VERDICTS_MAX + 10):
        assert not hosts.allow(b"%d.evil.example" % number)
    hosts.allow(b"x" * 100_000)
    assert len(hosts._verdicts) <= VERDICTS_MAX
    assert max(map(len, hosts._verdicts)) < 300
