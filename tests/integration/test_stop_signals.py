"""How processes that no supervisor started end: with status 0 after a drain, with the signal's at a second signal."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2
import pytest
import redis

from millstream.services.environment import child_environment
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.server import choose_binary
from millstream.services.queue.url import RedisAddress, client
from tests.kit.redis_server import redis_server
from tests.kit.stack import sigstopped
from tests.kit.wait import wait_until

WAIT_S = 120.0
INSTALLATION = "test"
KEYS = InstallationKeys(INSTALLATION)
COMMANDS = {
    "gateway": ("millstream.gateway",),
    "worker": ("millstream.workers", "--pool", "cpu", "--backend", "simulated"),
    "controller": ("millstream.services.plugin", "controller"),
}
#: Stops when it is told, and does not end by itself. Arguments: the drain time, whether a supervisor started it.
DRAINING_WORKER = """
import sys, time
from millstream.workers.leave import DrainThread
drain_s, supervised = float(sys.argv[1]), sys.argv[2] == "yes"
DrainThread(drain_s, supervised=supervised).start(lambda: print("stops", flush=True), lambda: None)
print("started", flush=True)
while True:
    time.sleep(600)
"""


class Running:
    """A process of the product, and what it has logged."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self._log = log

    def logged(self, pattern: str) -> re.Match[str]:
        """Return the first match in the log, waiting for it."""

        def found() -> re.Match[str] | None:
            assert self.process.poll() is None, self._log.read_text()
            return re.search(pattern, self._log.read_text())

        return wait_until(found, WAIT_S, pattern)

    def ends(self) -> int:
        """Return the exit status."""
        return self.process.wait(WAIT_S)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisAddress]:
    with redis_server(choose_binary(""), tmp_path_factory.mktemp("redis")) as address:
        yield address


@pytest.fixture
def server(address: RedisAddress) -> Iterator[redis.Redis]:
    with client(address) as connection:
        connection.flushall()
        yield connection


@contextmanager
def started(name: str, address: RedisAddress, server: redis.Redis, folder: Path) -> Iterator[Running]:
    """Start a process, as a container does, and wait until it works."""
    variables = {
        "MILLSTREAM_HOME": str(folder / "home"),
        "MILLSTREAM_REDIS_URL": address.url,
        "MILLSTREAM_INSTALLATION_NAME": INSTALLATION,
        "MILLSTREAM_HTTP_PORT": "0",
        "MILLSTREAM_GRPC_PORT": "0",
    }
    log = folder / "log"
    with log.open("wb") as output:
        command = [sys.executable, "-P", "-m", *COMMANDS[name]]
        process = subprocess.Popen(command, env=child_environment(variables), stdout=output, stderr=output)
    running = Running(process, log)
    try:
        if name == "worker":
            wait_until(lambda: server.sismember(KEYS.pools, "cpu"), WAIT_S, "a record of the worker")
        else:
            running.logged("listens on" if name == "gateway" else "leads with token")
        yield running
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_clean_drain_ends_with_status_0(name, number, address, server, tmp_path):
    """Kubernetes and systemd show any other status as a failure."""
    with started(name, address, server, tmp_path) as running:
        running.process.send_signal(number)
        assert running.ends() == 0


def test_a_second_signal_ends_a_draining_gateway_at_once(address, server, tmp_path):
    with started("gateway", address, server, tmp_path) as running:
        port = int(running.logged(r"listens on [\d.]+:(\d+)")[1])
        with socket.create_connection(("127.0.0.1", port)) as caller:  # half a request holds up the drain
            caller.sendall(b"POST /v2/models/m/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345")
            # Accepted after it, and answered: the gateway has the half request. This connection may still count.
            httpx2.get(f"http://127.0.0.1:{port}/v2/health/live", timeout=WAIT_S, trust_env=False).raise_for_status()
            running.process.send_signal(signal.SIGTERM)
            running.logged("draining: [12] connections")
            running.process.send_signal(signal.SIGTERM)
            assert running.ends() == 128 + signal.SIGTERM


def test_a_second_signal_ends_a_controller_that_waits_for_redis_at_once(address, server, tmp_path):
    with started("controller", address, server, tmp_path) as running, sigstopped(server.info("server")["process_id"]):
        running.process.send_signal(signal.SIGTERM)
        running.process.send_signal(signal.SIGINT)
        assert running.ends() in {128 + signal.SIGINT, 128 + signal.SIGTERM}


@pytest.mark.parametrize(("supervised", "drain_s", "status"), [("no", "600", 130), ("yes", "2", 3)])
def test_a_second_signal_ends_a_worker_unless_a_supervisor_would(supervised, drain_s, status):
    with subprocess.Popen(
        [sys.executable, "-c", DRAINING_WORKER, drain_s, supervised], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stops\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == status
