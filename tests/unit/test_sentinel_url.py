"""Sentinel URLs: whom they name, and that passwords stay out of everything that is shown."""

import pytest

from millstream.services.errors import Code, Failure
from millstream.services.queue.pipeline import check_reply, handshake_commands
from millstream.services.queue.sentinel import Sentinels
from millstream.services.queue.url import REPLY_S_MAX, WATCHED_REPLY_S_MAX, RedisAddress, Tls, async_client, client


@pytest.mark.parametrize(
    ("url", "hosts", "master"),
    [
        ("redis+sentinel://one/steady", [("one", 26379)], "steady"),
        ("redis+sentinel://one:1,two,three:3/steady/2", [("one", 1), ("two", 26379), ("three", 3)], "steady"),
        ("redis+sentinel://ann:se%2Fcret@[::1]:1,[::2]/my.master-1_a", [("::1", 1), ("::2", 26379)], "my.master-1_a"),
        ("  redis+sentinel://one/steady/?db=2\n", [("one", 26379)], "steady"),
    ],
)
def test_sentinels_and_the_name_of_the_master(url, hosts, master):
    assert RedisAddress.parse(url).sentinels == Sentinels(tuple(hosts), master)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis+sentinel://one/steady", {"username": None, "password": None, "db": 0}),
        ("redis+sentinel://:p%40ss@one/steady/3", {"username": None, "password": "p@ss", "db": 3}),
        ("redis+sentinel://ann:a%2Cb@one,two/steady?db=4", {"username": "ann", "password": "a,b", "db": 4}),
    ],
)
def test_user_password_and_database_are_the_masters(url, expected):
    address = RedisAddress.parse(url)
    assert {name: getattr(address, name) for name in expected} == expected
    assert address.tls is None


def test_the_sentinels_have_credentials_of_their_own():
    url = "redis+sentinel://ann:secret@one/steady/1?sentinel_username=bob&sentinel_password=p%26%2525"
    address = RedisAddress.parse(url)
    assert address.sentinels == Sentinels((("one", 26379),), "steady", "bob", "p&%25")
    assert (address.username, address.password, address.db) == ("ann", "secret", 1)


def test_tls_options_are_for_both():
    address = RedisAddress.parse("rediss+sentinel://one/steady?ssl_ca_certs=/c%20a.pem&sentinel_password=x")
    assert address.tls == Tls(ca_file="/c a.pem")
    assert address.sentinels == Sentinels((("one", 26379),), "steady", None, "x")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis+sentinel://", "redis+sentinel://"),
        ("redis+sentinel://one", "/master"),
        ("redis+sentinel://one/", "/master"),
        ("redis+sentinel:///steady", "host"),
        ("redis+sentinel://one,,two/steady", "host"),
        ("redis+sentinel://one:port/steady", "port"),
        ("redis+sentinel://one:70000/steady", "port"),
        ("redis+sentinel://:hunter2/x@one/steady", "percent-encoded"),
        ("redis+sentinel://:hunter2?x@one/steady", "percent-encoded"),
        ("redis+sentinel://:hunter2#x@one/steady", "percent-encoded"),
        ("redis+sentinel://:hunter2@x@one/steady", "percent-encoded"),
        ("redis+sentinel://ann:1/hunter2@one/steady", "percent-encoded"),
        ("redis+sentinel://one/steady/zero", "database"),
        ("redis+sentinel://one/steady?ssl_cert_reqs=none", "ssl_cert_reqs"),
        ("rediss+sentinel://:hunter2@one/steady?ssl_cert_reqs=maybe", "maybe"),
        ("redis+sentinel://one/steady?sentinel_pass=hunter2", "sentinel_password"),
        ("redis+sentinel://one/steady?sentinel_password=hunter2&retries=3", "retries"),
        ("unix+sentinel://one/steady", "redis+sentinel://"),
    ],
)
def test_a_url_that_cannot_be_used_says_why_without_its_password(url, says):
    with pytest.raises(Failure) as failure:
        RedisAddress.parse(url)
    assert failure.value.code is Code.INVALID
    assert says in failure.value.message
    assert "hunter2" not in failure.value.message


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (
            "redis+sentinel://ann:hunter2@one:1,[::2]/steady/3?sentinel_username=bob&sentinel_password=hunter2",
            "redis+sentinel://ann:***@one:1,[::2]:26379/steady/3",
        ),
        ("rediss+sentinel://one/steady", "rediss+sentinel://one:26379/steady/0"),
    ],
)
def test_shown_without_password(url, shown):
    address = RedisAddress.parse(url)
    assert str(address) == shown
    assert "hunter2" not in repr(address)
    assert address.url == url


def test_clients_carry_what_is_said_of_the_master():
    address = RedisAddress.parse("rediss+sentinel://ann:secret@one/steady/3?ssl_ca_certs=/ca.pem&sentinel_password=x")
    for made in (client(address), async_client(address)):
        options = made.connection_pool.connection_kwargs
        assert (options["username"], options["password"], options["db"]) == ("ann", "secret", 3)
        assert options["ssl_ca_certs"] == "/ca.pem"
        assert "secret" not in repr(made)


def test_who_may_be_another_by_now_is_not_waited_for_so_long():
    watched, plain = RedisAddress.parse("redis+sentinel://one/steady"), RedisAddress.parse("redis://one")
    assert (watched.reply_s_max, plain.reply_s_max) == (WATCHED_REPLY_S_MAX, REPLY_S_MAX)
    assert client(watched).connection_pool.connection_kwargs["socket_timeout"] == WATCHED_REPLY_S_MAX < REPLY_S_MAX


def test_a_server_that_sentinels_name_is_asked_for_its_role():
    words = handshake_commands(RedisAddress.parse("redis+sentinel://:p@one/steady/2"))
    assert words == [("AUTH", "p"), ("SELECT", "2"), ("ROLE",)]
    check_reply(("ROLE",), [b"master", 0, []])
    check_reply(("SELECT", "2"), b"OK")
    with pytest.raises(Failure, match="not a master") as failure:
        check_reply(("ROLE",), [b"slave", b"127.0.0.1", 6379, b"connected", 0])
    assert failure.value.code is Code.UNAVAILABLE
