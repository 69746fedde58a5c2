"""`millstream up` under a service manager: the datagrams of sd_notify(3) that a real socket receives, and the unit."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from millstream.services.environment import child_environment
from millstream.services.supervisor.service_manager import STATUS_CHARACTERS_MAX, ServiceManager
from tests.kit.wait import wait_until

ROOT = Path(__file__).parents[2]
UNITS = [ROOT / "deploy/systemd" / name for name in ("millstream.service", "millstream-worker.service")]
WAIT_S = 120


class Manager:
    """The socket of a service manager, and an installation that it started."""

    def __init__(self, address: str, home: Path, port: str, environment: dict[str, str]) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address.replace("@", "\0", 1))
        self.socket.settimeout(WAIT_S)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "millstream.services.cli", "up", "--http-port", port, "--grpc-port", "-1"],
            env=child_environment({"MILLSTREAM_HOME": str(home), "NOTIFY_SOCKET": address} | environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def received(self) -> dict[str, str]:
        lines = self.socket.recv(4096).decode().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def until(self, name: str, value: str = "") -> dict[str, str]:
        """Receive datagrams up to one whose `name` begins with `value`."""
        while True:
            message = self.received()
            if message.get(name, "\0").startswith(value):
                return message


@contextmanager
def started(address: str, home: Path, port: str = "0", **environment: str) -> Iterator[Manager]:
    manager = Manager(address, home, port, environment)
    try:
        yield manager
    finally:
        if manager.process.poll() is None:
            manager.process.kill()
        manager.process.wait(WAIT_S)
        manager.socket.close()


def environment_of(pid: int) -> set[str]:
    return {pair.split(b"=")[0].decode() for pair in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")}


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def runs_another_program(pid: int, parent: int) -> bool:
    return command_of(pid) != command_of(parent)


def children_of(pid: int) -> dict[str, int]:
    """Return the pids of gateway, worker and Redis."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = {}
    for child in children:
        # A child that was just forked is a copy of its parent until it runs its own program.
        wait_until(partial(runs_another_program, int(child), pid), what="it runs its program")
        command = command_of(int(child)).replace(b"\0", b" ").decode()
        kinds = ("millstream.gateway", "millstream.workers")
        found[next((kind.removeprefix("millstream.") for kind in kinds if kind in command), "redis")] = int(child)
    return found


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_start_reload_and_stop_are_told(kind: str, tmp_path: Path) -> None:
    address = f"@millstream-{secrets.token_hex(8)}" if kind == "abstract" else str(tmp_path / "notify")
    with started(address, tmp_path / "home") as manager:
        ready = manager.received()
        assert ready.keys() == {"READY", "STATUS"}
        assert ready["STATUS"].startswith("serving http://127.0.0.1:")
        for child in children_of(manager.process.pid).values():
            assert not environment_of(child) & {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}
        manager.process.send_signal(signal.SIGHUP)
        reloading = manager.received()
        assert reloading["RELOADING"] == "1"
        assert int(reloading["MONOTONIC_USEC"]) > 0
        assert manager.received() == ready
        manager.process.send_signal(signal.SIGTERM)
        assert manager.received() == {"STOPPING": "1", "STATUS": "stopping: SIGTERM"}
        assert manager.process.wait(WAIT_S) == 0


def test_the_watchdog_is_answered_while_a_gateway_answers(tmp_path: Path) -> None:
    with started(f"@millstream-{secrets.token_hex(8)}", tmp_path / "home", WATCHDOG_USEC="10000000") as manager:
        manager.until("READY")
        assert manager.until("WATCHDOG") == {"WATCHDOG": "1"}
        gateway = children_of(manager.process.pid)["gateway"]
        os.kill(gateway, signal.SIGSTOP)
        manager.until("STATUS", "no gateway answers within")
        manager.socket.setblocking(False)
        with pytest.raises(BlockingIOError):
            manager.received()
        manager.socket.settimeout(WAIT_S)
        os.kill(gateway, signal.SIGCONT)
        assert manager.received() == {"STATUS": "serving again"}
        assert manager.received() == {"WATCHDOG": "1"}
        manager.process.send_signal(signal.SIGTERM)
        manager.until("STOPPING")
        assert manager.process.wait(WAIT_S) == 0
    assert "no gateway answers" in (tmp_path / "home/logs/supervisor.log").read_text()


def test_a_start_that_fails_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        with started(str(tmp_path / "notify"), tmp_path / "home", port) as manager:
            assert manager.received() == {"STOPPING": "1", "STATUS": "stopping: the start failed"}
            assert manager.process.wait(WAIT_S) == 1


@pytest.mark.parametrize("address", ["/nowhere/notify", "relative", "@", "@nobody-listens", "x" * 200, "/" + "x" * 200])
def test_a_manager_that_does_not_listen_changes_nothing(address: str) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "never"})
    manager.ready("x")
    manager.stopping("x")


def test_a_status_is_one_short_line(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "n"))
        ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "n")}).ready("a\nREADY=0\ud800" + "x" * 100_000)
        lines = listener.recv(1 << 20).decode().splitlines()
    assert lines[0] == "READY=1"
    assert lines[1].startswith(r"STATUS=a\nREADY=0")
    assert len(lines) == 2
    assert len(lines[1]) < 2 * STATUS_CHARACTERS_MAX


@pytest.mark.needs("systemd-analyze")
@pytest.mark.parametrize("shipped", UNITS, ids=lambda path: path.name)
def test_systemd_accepts_the_unit(shipped: Path, tmp_path: Path) -> None:
    """It says only what is wrong with a unit, and always exits with 0."""
    unit = tmp_path / shipped.name
    unit.write_text(shipped.read_text().replace("/opt/millstream/bin/millstream", sys.executable))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
