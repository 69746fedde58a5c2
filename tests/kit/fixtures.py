"""Fixtures of tests in several folders: one running product for those that only call it, and a pool on every Redis."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from millstream.services.queue.server import Binary
from millstream.services.queue.url import RedisAddress, client
from tests.kit.pool import Pool
from tests.kit.redis_server import binaries, redis_server
from tests.kit.stack import Stack, assert_quiet, running_stack


@pytest.fixture(scope="session")
def shared_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), gateways=2, pools="cpu=2") as stack:
        yield stack


@pytest.fixture
def stack(shared_stack: Stack) -> Iterator[Stack]:
    """Two gateways and two CPU workers; after the test nothing of it is on its way or held."""
    yield shared_stack
    assert_quiet(shared_stack)


@pytest.fixture(scope="module", params=binaries(), ids=str)
def redis_address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisAddress]:
    binary: Binary = request.param
    with redis_server(binary, tmp_path_factory.mktemp("redis")) as address:
        yield address


@pytest.fixture
def stored(redis_address: RedisAddress) -> Iterator[redis.Redis]:
    """A connection to a Redis with nothing in it."""
    with client(redis_address) as connection:
        connection.flushall()
        yield connection


@pytest.fixture(scope="module")
def server(redis_address: RedisAddress) -> Iterator[Pool]:
    pool = Pool(redis_address)
    yield pool
    pool.close()


@pytest.fixture
def pool(server: Pool) -> Iterator[Pool]:
    """A pool with nothing in it; whatever the test did, its state is sound afterwards."""
    server.clear()
    yield server
    server.check()
