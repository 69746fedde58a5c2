"""A pool on every Redis server that is to be had. Tests of something else have a server of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millstream.services.queue.server import Binary
from tests.kit.pool import Pool
from tests.kit.redis_server import binaries, redis_server


@pytest.fixture(scope="module", params=binaries(), ids=str)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    binary: Binary = request.param
    with redis_server(binary, tmp_path_factory.mktemp("redis")) as address:
        pool = Pool(address)
        yield pool
        pool.close()


@pytest.fixture
def pool(server: Pool) -> Iterator[Pool]:
    """A pool with nothing in it; whatever the test did, its state is sound afterwards."""
    server.clear()
    yield server
    server.check()
