"""The faults of a soak. Each fault ends before the next one begins."""

from __future__ import annotations

import os
import random
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx2
import numpy as np

from tests.kit import v2
from tests.kit.stack import Stack, children, sigstopped
from tests.kit.wait import wait_until
from tests.soak.callers import Callers
from tests.soak.hostile import HostileCallers

FROZEN_S = 3.0  # past the lease of 2 s
PAUSED_S = 1.5
DAWDLE_S = 1.0
RESTART_AGAIN_S = 30.0
LINES_SHOWN = 40
SLOW_CLIENTS = 20
ROOM_BYTES = 100 << 20  # for a run of "wide" that takes 8 MiB for each row
WIDE_COLUMNS = 1 << 21


class Faults:
    """Injects faults in random order.

    Args:
        versions: model files with one signature; uploads to the model "rolled" alternate between them.

    Attributes:
        failures: descriptions of faults after which the stack did not behave as expected.
    """

    def __init__(
        self, stack: Stack, callers: Callers, hostile: HostileCallers, versions: list[Path], seed: int
    ) -> None:
        self._stack = stack
        self._callers = callers
        self._hostile = hostile
        self.failures: list[str] = []
        self._versions = versions
        self._random = random.Random(seed)
        self._ahead: list[tuple[str, Callable[[], None]]] = []
        self._kinds: list[tuple[str, Callable[[], None]]] = [
            ("worker killed", lambda: self._kill("cpu-")),
            ("worker frozen", lambda: self._freeze("cpu-", FROZEN_S)),
            ("gateway killed", lambda: self._kill("gateway-")),
            ("redis killed", lambda: self._kill("redis")),
            ("redis paused", lambda: self._freeze("redis", PAUSED_S)),
            ("redis emptied", self._empty),
            ("connections to redis cut", self._cut),
            ("a request that kills workers", self._poison),
            ("no memory", self._starve),
            ("slow clients", self._dawdle),
            ("a new version", self._roll),
            ("a model that must be refused", lambda: self._hostile.upload_refused(self._random)),
            ("all processes replaced", self._replace),
        ]

    def next(self) -> str:
        """Run the next fault to its end and return its name.

        Every kind runs once, in random order, before any kind runs again.
        """
        if not self._ahead:
            self._ahead = self._random.sample(self._kinds, len(self._kinds))
        name, happen = self._ahead.pop()
        try:
            happen()
        except (AssertionError, httpx2.HTTPError) as error:
            last_lines = "\n    ".join(self._stack.lines[-LINES_SHOWN:])
            self.failures.append(
                f"{name}: {error!r}; processes: {self._stack.pids()}; the last lines:\n    {last_lines}"
            )
        return name

    def _replace(self) -> None:
        """Replace all processes. A hostile request may kill a new worker and end the restart: then repeat it."""
        before = wait_until(self._settled_pids, what="all processes")
        requested_at = 0.0

        def replaced() -> bool:
            nonlocal requested_at
            if time.monotonic() - requested_at > RESTART_AGAIN_S:
                self._stack.process.send_signal(signal.SIGHUP)
                requested_at = time.monotonic()
            now = self._settled_pids()
            return now is not None and set(now.values()).isdisjoint(before.values())

        wait_until(replaced, timeout_s=180, what="all processes replaced")

    def _settled_pids(self) -> dict[str, int] | None:
        """Return the pids of gateways and workers; None while one is missing or a replacement runs beside one."""
        pids = {name: pid for name, pid in self._stack.pids().items() if name != "redis"}
        return pids if len(pids) == 4 and len(children(self._stack.process.pid)) == 5 else None

    def _pick(self, prefix: str) -> tuple[str, int]:
        """Return name and pid of a running process; others may still be restarting after an earlier fault."""
        pids = wait_until(
            lambda: {name: pid for name, pid in self._stack.pids().items() if name.startswith(prefix)},
            what=f"a {prefix} process",
        )
        name = self._random.choice(sorted(pids))
        return name, pids[name]

    def _kill(self, prefix: str) -> None:
        name, pid = self._pick(prefix)
        if prefix == "gateway-":
            self._callers.gateway_died = time.monotonic() + 1
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: self._stack.pids().get(name, pid) != pid, what=f"{name} is back")

    def _freeze(self, prefix: str, seconds: float) -> None:
        with sigstopped(self._pick(prefix)[1]):
            time.sleep(seconds)

    def _empty(self) -> None:
        self._stack.redis.flushall()

    def _cut(self) -> None:
        self._stack.redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def _poison(self) -> None:
        """Send a request that kills workers: it must get an error, or a refusal; other callers must not be affected."""
        body, headers = v2.request({"x": np.array([[-1], [self._random.getrandbits(40)]], np.int64)})
        reply = self._stack.http.post("/v2/models/fragile/infer", content=body, headers=headers)
        assert reply.status_code in (500, 503), reply.text

    def _starve(self) -> None:
        """Limit the memory of the workers so that a batch does not fit and must be halved."""
        pids = [pid for name, pid in self._stack.pids().items() if name.startswith("cpu-")]
        rows = np.arange(64, dtype=np.float32).reshape(64, 1)
        body, headers = v2.request({"x": rows})
        try:
            for pid in pids:
                with suppress(ProcessLookupError, FileNotFoundError):  # still down after an earlier fault
                    address_space = int(Path(f"/proc/{pid}/statm").read_text().split()[0]) * resource.getpagesize()
                    resource.prlimit(pid, resource.RLIMIT_AS, (address_space + ROOM_BYTES, resource.RLIM_INFINITY))
            reply = self._stack.http.post("/v2/models/wide/infer", content=body, headers=headers)
        finally:
            for pid in pids:
                with suppress(ProcessLookupError):
                    resource.prlimit(pid, resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert reply.status_code in (200, 503), reply.text
        if reply.status_code == 200:
            np.testing.assert_array_equal(v2.outputs(reply.content, reply.headers)["y"], rows * WIDE_COLUMNS)

    def _dawdle(self) -> None:
        """Open connections that send half a request, or do not read the reply, and close them after DAWDLE_S."""
        large = np.zeros((8, 16384), np.float32)
        body, headers = v2.request({"x": large}, binary=True, binary_outputs=True)
        head = [f"POST /v2/models/large/infer HTTP/1.1\r\nHost: soak\r\nContent-Length: {len(body)}"]
        request = "\r\n".join([*head, *(f"{name}: {value}" for name, value in headers.items()), "", ""]).encode() + body
        with ExitStack() as connections:
            for number in range(SLOW_CLIENTS):
                connection = connections.enter_context(socket.create_connection(("127.0.0.1", self._stack.port)))
                with suppress(OSError):  # its gateway may be down
                    connection.sendall(request if number % 2 else request[: len(request) // 2])
            time.sleep(DAWDLE_S)

    def _roll(self) -> None:
        """Upload a new version, which becomes the active one, and delete the versions before the previous one."""
        admin = "/admin/v1/models/rolled"
        path = self._random.choice(self._versions)
        pushed = self._stack.http.post(f"{admin}/versions", params={"wait": 60}, content=path.read_bytes())
        assert pushed.status_code in {200, 201}, pushed.text  # 200: a version that was not deleted yet
        for version in self._stack.http.get(admin).json()["versions"]:
            if version["version"] < pushed.json()["version"] - 1:
                self._stack.http.delete(f"{admin}/versions/{version['version']}")
