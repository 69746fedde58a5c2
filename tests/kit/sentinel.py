"""Runs a Redis master, its replica and three sentinels that watch them; all of them require passwords.

with watched_redis(folder) as watched: ...      watched.address -> watched.master -> kill, start, fail over
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import RedisAddress
from tests.kit.wait import wait_until

NAME = "steady"
PASSWORD = "of/the@servers"
SENTINEL_PASSWORD = "of:the#sentinels"
SENTINELS = 3
QUORUM = 2
DOWN_MS = 1000  # a master that is silent for this time counts as down
NEVER_MS = 3_600_000  # the same, for tests whose master stays: a machine may let it wait for a minute
FAILOVER_MS = 5000
OFTEN_MS = 300  # interval at which sentinels poll replicas and each other; the default of seconds would delay tests
START_S_MAX = 240.0
FAILOVER_S_MAX = 240.0
FAILOVER_RETRY_S = 3 * FAILOVER_MS / 1000

_SERVER = """
bind 127.0.0.1
port {port}
dir {folder}
save ""
appendonly no
repl-diskless-sync-delay 0
requirepass {password}
masterauth {password}
"""
_SENTINEL = """
bind 127.0.0.1
port {port}
dir {folder}
requirepass {own_password}
sentinel monitor {name} 127.0.0.1 {master} {quorum}
sentinel auth-pass {name} {password}
sentinel down-after-milliseconds {name} {down_ms}
sentinel failover-timeout {name} {failover_ms}
"""


class Server:
    """A server whose port stays reserved when it ends. `configuration` is the text of a file that it may rewrite."""

    def __init__(self, port: int, folder: Path, configuration: str, password: str, *options: str) -> None:
        self.port = port
        self._file = folder / f"{port}.conf"
        self._file.write_text(configuration)
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None
        self.redis: Any = redis.Redis("127.0.0.1", port, password=password, decode_responses=True, protocol=2)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def role(self) -> str | None:
        """Return the role that the server reports (master, slave, sentinel); None if it does not answer."""
        with suppress(RedisConnectionError):
            return str(self.redis.role()[0])
        return None

    def start(self) -> None:
        command = [str(choose_binary().path), str(self._file), *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_until(lambda: self.role, START_S_MAX, f"the server on port {self.port} answers")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(START_S_MAX)

    def stop(self) -> None:
        self.redis.close()
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            assert self._process.wait(START_S_MAX) == 0


class Watched:
    """The running servers: `servers[0]` starts as the master; `sentinels` are in the order of the URL."""

    def __init__(self, folder: Path, ports: list[int], down_ms: int) -> None:
        own = {"folder": folder, "password": PASSWORD}
        self.servers = [Server(port, folder, _SERVER.format(port=port, **own), PASSWORD) for port in ports[:2]]
        values = {
            **own,
            "own_password": f'"{SENTINEL_PASSWORD}"',
            "name": NAME,
            "master": ports[0],
            "quorum": QUORUM,
            "down_ms": down_ms,
            "failover_ms": FAILOVER_MS,
        }
        self.sentinels = [
            Server(port, folder, _SENTINEL.format(port=port, **values), SENTINEL_PASSWORD, "--sentinel")
            for port in ports[2:]
        ]
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports[2:])
        password, own_password = quote(PASSWORD, safe=""), quote(SENTINEL_PASSWORD, safe="")
        self.address = RedisAddress.parse(
            f"redis+sentinel://:{password}@{hosts}/{NAME}/1?sentinel_password={own_password}"
        )

    def start(self) -> None:
        """Start all servers and wait until they know each other."""
        for server in (*self.servers, *self.sentinels):
            server.start()
        self.servers[1].redis.replicaof("127.0.0.1", self.servers[0].port)
        for sentinel in self.sentinels:
            sentinel.redis.execute_command("SENTINEL", "DEBUG", "info-period", OFTEN_MS, "publish-period", OFTEN_MS)
        wait_until(self._known, START_S_MAX, "all know each other")

    def stop(self) -> None:
        for server in (*self.sentinels, *self.servers):
            server.stop()

    @property
    def master(self) -> Server:
        """The master according to the last sentinel, which no test kills."""
        _, port = self._call_sentinel("GET-MASTER-ADDR-BY-NAME", NAME)
        return next(server for server in self.servers if server.port == int(port))

    def other(self, server: Server) -> Server:
        return next(one for one in self.servers if one is not server)

    def took_over(self, before: Server) -> Server:
        """Wait until the sentinels have promoted the server other than `before`; return it."""
        after = self.other(before)
        wait_until(lambda: self.master is after and after.role == "master", FAILOVER_S_MAX, "another master")
        return after

    def follows(self, server: Server) -> None:
        """Wait until a server is an up-to-date replica that the sentinels would promote."""
        wait_until(lambda: server.role == "slave", FAILOVER_S_MAX, "a replica")
        wait_until(lambda: _in_step(server), FAILOVER_S_MAX, "in step")

    def step_down(self, server: Server) -> Server:
        """Make the sentinels promote the other server while this one works; return the new master.

        Sentinels abort a failover that takes too long, so it is requested again.
        """
        requested_at = float("-inf")

        def stepped_down() -> bool:
            nonlocal requested_at
            if self.master is not server and self.master.role == "master":
                return True
            if time.monotonic() - requested_at > FAILOVER_RETRY_S and self._failover():
                requested_at = time.monotonic()
            return False

        wait_until(stepped_down, FAILOVER_S_MAX, "another master")
        return self.other(server)

    @staticmethod
    def introduce(sentinel: Server, name: str, port: int) -> None:
        """Make one sentinel watch, and name, the server on a port, for longer than a test lasts."""
        sentinel.redis.sentinel_monitor(name, "127.0.0.1", port, QUORUM)
        sentinel.redis.sentinel_set(name, "auth-pass", PASSWORD)
        sentinel.redis.sentinel_set(name, "down-after-milliseconds", 600_000)

    def _failover(self) -> bool:
        with suppress(ResponseError):  # the sentinel has not polled the replica yet
            return bool(self._call_sentinel("FAILOVER", NAME))
        return False

    def _call_sentinel(self, *words: str) -> Any:
        return self.sentinels[-1].redis.execute_command("SENTINEL", *words)

    def _known(self) -> bool:
        states = [sentinel.redis.sentinel_masters()[NAME] for sentinel in self.sentinels]
        others = [(state["num-slaves"], state["num-other-sentinels"]) for state in states]
        return others == [(1, SENTINELS - 1)] * SENTINELS and _in_step(self.servers[1])


def _in_step(replica: Server) -> bool:
    return bool(replica.redis.info("replication")["master_link_status"] == "up")


@contextmanager
def watched_redis(folder: Path, down_ms: int = DOWN_MS) -> Iterator[Watched]:
    """Start a master, a replica and sentinels, yield them, and stop those that still run.

    `down_ms`: a master that is silent for this time is replaced.
    """
    folder.mkdir()
    with ExitStack() as ports:
        # A port that is bound but not listened on is given to no other process, and a server with SO_REUSEPORT can
        # use it.
        sockets = [ports.enter_context(socket.socket()) for _ in range(2 + SENTINELS)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(("127.0.0.1", 0))
        watched = Watched(folder, [one.getsockname()[1] for one in sockets], down_ms)
        try:
            watched.start()
            yield watched
        finally:
            watched.stop()
