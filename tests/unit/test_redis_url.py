"""Redis URLs: what they mean, and that passwords stay out of everything that is shown."""

import ssl

import pytest

from millstream.services.errors import Code, Failure
from millstream.services.queue.url import RedisAddress, Tls, async_client, client


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://", {"host": "localhost", "port": 6379, "db": 0}),
        ("redis://cache.example:7000/3", {"host": "cache.example", "port": 7000, "db": 3}),
        ("redis://cache.example?db=4", {"host": "cache.example", "db": 4}),
        ("redis://cache.example/", {"host": "cache.example", "db": 0}),
        ("redis://[::1]:7000/1", {"host": "::1", "port": 7000, "db": 1}),
        ("redis://:p%40ss%2Fword@h", {"username": None, "password": "p@ss/word"}),
        ("redis://ann:secret@h:1", {"username": "ann", "password": "secret"}),
        ("unix:///run/redis.sock", {"path": "/run/redis.sock", "db": 0}),
        ("unix://ann:secret@/run/redis%20one.sock?db=2", {"path": "/run/redis one.sock", "db": 2, "username": "ann"}),
        ("  redis://h:1/1\n", {"host": "h", "port": 1, "db": 1}),
    ],
)
def test_parts_of_a_url(url, expected):
    address = RedisAddress.parse(url)
    assert {name: getattr(address, name) for name in expected} == expected
    assert address.tls is None
    assert address.ssl_context() is None


def test_tls_options():
    address = RedisAddress.parse("rediss://h:6380/1?ssl_cert_reqs=none&ssl_check_hostname=false&ssl_ca_certs=/ca.pem")
    assert address.tls == Tls(verify="none", check_hostname=False, ca_file="/ca.pem")
    strict = RedisAddress.parse("rediss://h").ssl_context()
    lenient = RedisAddress.parse("rediss://h?ssl_cert_reqs=none").ssl_context()
    unnamed = RedisAddress.parse("rediss://h?ssl_check_hostname=false").ssl_context()
    assert strict is not None
    assert lenient is not None
    assert unnamed is not None
    assert (strict.verify_mode, strict.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert (lenient.verify_mode, lenient.check_hostname) == (ssl.CERT_NONE, False)
    assert (unnamed.verify_mode, unnamed.check_hostname) == (ssl.CERT_REQUIRED, False)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("localhost:6379", "redis://"),
        ("http://hunter2@h", "redis://"),
        ("redis://:hunter2#x@h", "percent-encoded"),
        ("redis://:hunter2@h:port", "percent-encoded"),
        ("redis://:hunter2@h/zero", "database"),
        ("redis://:hunter2@h?db=-1", "database"),
        ("redis://:hunter2@h?db=x", "redis://"),
        ("unix://", "socket path"),
        ("redis://:hunter2@h?ssl_cert_reqs=none", "ssl_cert_reqs"),
        ("rediss://:hunter2@h?ssl_cert_reqs=maybe", "maybe"),
        ("redis://:hunter2@h?retries=3", "retries"),
    ],
)
def test_a_url_that_cannot_be_used_says_why_without_its_password(url, says):
    with pytest.raises(Failure) as failure:
        RedisAddress.parse(url)
    assert failure.value.code is Code.INVALID
    assert says in failure.value.message
    assert "hunter2" not in failure.value.message


def test_a_certificate_that_is_not_there_is_one_clear_failure():
    address = RedisAddress.parse("rediss://h?ssl_ca_certs=/nowhere/ca.pem")
    with pytest.raises(Failure, match="certificate"):
        address.ssl_context()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://ann:hunter2@h/2", "redis://ann:***@h:6379/2"),
        ("redis://:hunter2@[::1]:1", "redis://:***@[::1]:1/0"),
        ("rediss://h", "rediss://h:6379/0"),
        ("unix://:hunter2@/s.sock?db=1", "unix://:***@/s.sock?db=1"),
        ("redis://ann@h", "redis://ann@h:6379/0"),
    ],
)
def test_shown_without_password(url, shown):
    address = RedisAddress.parse(url)
    assert str(address) == shown
    assert "hunter2" not in repr(address)
    assert address.url == url


def test_unix_addresses_survive_their_url():
    address = RedisAddress.unix("/tmp/a b/é?.sock")
    assert RedisAddress.parse(address.url) == address


def test_clients_carry_the_address():
    address = RedisAddress.parse("rediss://ann:secret@h:7000/3?ssl_ca_certs=/ca.pem")
    for made in (client(address), async_client(address)):
        options = made.connection_pool.connection_kwargs
        assert (options["host"], options["port"], options["db"]) == ("h", 7000, 3)
        assert (options["username"], options["password"], options["protocol"]) == ("ann", "secret", 2)
        assert options["ssl_ca_certs"] == "/ca.pem"
        assert options["socket_timeout"] > 0
    local = client(RedisAddress.unix("/s.sock")).connection_pool.connection_kwargs
    assert local["path"] == "/s.sock"
