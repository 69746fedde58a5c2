"""The supervisor over small real programs and a real Redis: start, restart, order of the stop, no leftovers."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from millstream.services.environment import child_environment
from millstream.services.installation import installation_name
from millstream.services.queue.keys import InstallationKeys
from millstream.services.queue.server import socket_path
from millstream.services.queue.url import RedisAddress, client
from millstream.services.settings import Settings, settings_class
from millstream.services.wire.worker_id import worker_id
from tests.kit.wait import wait_until

ROOT = Path(__file__).parents[2]
WAIT_S = 120


class Up:
    """A running supervisor process; `lines` is its output so far."""

    def __init__(self, home: Path, segments: Path, terminal: int | None = None, **settings: str) -> None:
        self.home = home
        self.lines: list[str] = []
        environment = {
            "HOME": home,
            "SHM_DIR": segments,
            "HTTP_PORT": 0,
            "GRPC_PORT": 0,
            "PRELOAD": "none",
        } | settings
        assert {name.lower() for name in environment} <= settings_class().model_fields.keys()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.programs.supervise"],
            cwd=ROOT,
            env=child_environment({f"MILLSTREAM_{name}": str(value) for name, value in environment.items()}),
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=None if terminal is None else partial(fcntl.ioctl, terminal, termios.TIOCSCTTY, 0),  # noqa: PLW1509
        )

    def until(self, start: str) -> str:
        """Read lines up to one that begins with `start`; return the rest of that line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(start):
                return line[len(start) :].strip()
        raise AssertionError(f"no line {start!r} in:\n" + "\n".join(self.lines))

    def end(self) -> int:
        """Read all output; return the exit code."""
        assert self.process.stdout is not None
        self.lines.extend(line.rstrip("\n") for line in self.process.stdout)
        return self.process.wait(WAIT_S)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.end()

    @property
    def address(self) -> RedisAddress:
        return RedisAddress.unix(str(socket_path(self.home / "run")))

    def pids(self) -> dict[str, int]:
        """Return the pids of the children that reported their start, by name."""
        started = [line.removeprefix("started ") for line in self.lines if line.startswith("started ")]
        return {name: int(pid) for name, _, pid in (line.rpartition("-") for line in started)}


Start = Callable[..., Up]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    segments = tmp_path / "segments"
    segments.mkdir()
    ups: list[Up] = []

    def start_(home: Path = tmp_path / "home", terminal: int | None = None, **settings: str) -> Up:
        ups.append(Up(home, segments, terminal, **settings))
        return ups[-1]

    yield start_
    for up in ups:
        if up.process.poll() is None:
            up.process.kill()
        up.end()
        assert up.process.stdout is not None
        up.process.stdout.close()
    assert list(segments.iterdir()) == [] or any(up.process.returncode == -signal.SIGKILL for up in ups)


def gone(pid: int) -> bool:
    """Wait for the end of a process that is not our child."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([fd], [], [], WAIT_S)[0])
    finally:
        os.close(fd)


def descendants(pid: int) -> list[int]:
    path = Path(f"/proc/{pid}/task/{pid}/children")
    children = [int(child) for child in path.read_text().split()]
    return children + [each for child in children for each in descendants(child)]


def test_all_processes_start_and_stop_in_order(start):
    up = start(GATEWAYS="2", POOLS="cpu=1,big=1")
    url = up.until("ready ")
    assert urllib.request.urlopen(url, timeout=WAIT_S).status == 200
    assert (up.home / "run" / "url").read_text().strip() == url
    assert set(up.pids()) == {"gateway-0", "gateway-1", "cpu-0", "big-0"}
    children = descendants(up.process.pid)
    assert len(children) == 5  # and Redis

    assert up.stop() == 0

    assert up.lines[-1] == "stopped"
    stopped = (up.home / "stopped").read_text().split()
    assert set(stopped[:2]) == {"gateway-0", "gateway-1"}
    assert set(stopped[2:]) == {"cpu-0", "big-0"}
    assert all(gone(pid) for pid in children)
    assert sorted(path.name for path in (up.home / "run").iterdir()) == ["lock", "token"]
    assert "WARNING cpu-0 is only a test" in (up.home / "logs" / "cpu-0.log").read_text()
    assert "said cpu-0: WARNING cpu-0 is only a test" in up.lines


def test_ctrl_c_reaches_only_the_supervisor(start):
    up = start()
    up.until("ready ")
    os.killpg(up.process.pid, signal.SIGINT)
    assert up.end() == 0
    assert (up.home / "stopped").read_text().split() == ["gateway-0", "cpu-0"]


def test_a_closed_terminal_stops_everything_and_a_hangup_signal_restarts(start):
    """The kernel sends SIGHUP when a terminal is closed (termios(3)); users send it to request a restart."""
    master, terminal = os.openpty()
    up = start(terminal=terminal)
    os.close(terminal)
    up.until("ready ")
    up.process.send_signal(signal.SIGHUP)
    up.until("said SIGHUP: replacing all processes")
    os.close(master)  # while a worker that says nothing in Redis is waited for
    up.until("said SIGHUP: answering requests in flight, then stopping")
    up.until("said restart: millstream is being stopped")
    assert up.end() == 0
    assert up.lines[-1] == "stopped"


def test_a_restart_during_the_start_is_rejected(start):
    up = start()
    up.until("started ")
    up.process.send_signal(signal.SIGHUP)
    said = up.until("said restart: ")
    # the children may have been quicker than the signal
    assert said == "millstream is still starting: nothing was restarted" or "ready" in up.lines
    assert up.stop() == 0


def test_a_dead_worker_is_announced_and_restarted(start):
    up = start()
    up.until("ready ")
    with client(up.address) as redis, redis.pubsub(ignore_subscribe_messages=True) as channel:
        channel.subscribe(InstallationKeys(installation_name(Settings(home=up.home))).changes)
        assert channel.get_message(timeout=WAIT_S) is None  # the subscription itself
        pid = up.pids()["cpu-0"]
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        start_id = words[words.index("--start-id") + 1]
        os.kill(pid, signal.SIGKILL)
        message = next(channel.listen())
        assert message["data"] == f"died:{worker_id('cpu-0', start_id)}".encode()
        assert up.until("said cpu-0 was ended by SIGKILL").startswith(": restarting it in 0.")
        again = wait_until(lambda: redis.blpop(["test:started"], timeout=1), WAIT_S, what="started again")
        assert again[1].startswith(b"cpu-0-")
        assert again[1] != f"cpu-0-{pid}".encode()
    assert up.stop() == 0


def test_a_dead_gateway_restarts_on_the_same_port(start):
    up = start()
    url = up.until("ready ")
    os.kill(up.pids()["gateway-0"], signal.SIGKILL)
    # Connections wait in the socket that the supervisor holds.
    assert urllib.request.urlopen(url, timeout=WAIT_S).status == 200
    assert up.stop() == 0


def test_processes_started_by_a_child_end_with_it(start):
    up = start(POOLS="parent=1")
    up.until("ready ")
    with client(up.address) as redis:
        grandchild = int(redis.get("test:grandchild") or 0)
    os.kill(up.pids()["parent-0"], signal.SIGKILL)
    assert gone(grandchild)
    assert up.stop() == 0


def test_a_dead_redis_restarts_on_the_same_socket(start):
    up = start()
    up.until("ready ")
    with client(up.address) as redis:
        pid = redis.info("server")["process_id"]
        os.kill(pid, signal.SIGKILL)
        up.until("said redis was ended by SIGKILL")
        assert gone(pid)
    assert up.stop() == 0


def test_children_die_with_a_killed_supervisor_and_the_next_one_cleans_up(start):
    up = start()
    up.until("ready ")
    children = descendants(up.process.pid)
    assert len(children) == 3
    up.process.kill()
    up.end()
    assert all(gone(pid) for pid in children)

    after = start()
    after.until("ready ")
    assert after.stop() == 0
    assert list((up.home.parent / "segments").iterdir()) == []


def test_a_child_that_does_not_stop_is_killed(start):
    up = start(POOLS="stubborn=1", DRAIN_S="0.5")
    up.until("ready ")
    pid = up.pids()["stubborn-0"]
    assert up.stop() == 0
    assert any(line.startswith("said stubborn-0 did not stop within 0.4") for line in up.lines)
    assert gone(pid)


def test_a_second_ctrl_c_kills(start):
    up = start(POOLS="stubborn=1", DRAIN_S="600")
    up.until("ready ")
    children = descendants(up.process.pid)
    up.process.send_signal(signal.SIGINT)
    up.until("said SIGINT: answering")
    assert up.stop(signal.SIGINT) == 130
    assert all(gone(pid) for pid in children)
    assert sorted(path.name for path in (up.home / "run").iterdir()) == ["lock", "token"]


def test_ctrl_c_while_starting(start):
    up = start(POOLS="cpu=2")
    up.until("started ")
    assert up.stop(signal.SIGINT) == 0


def test_a_second_instance_is_rejected_with_the_pid_and_url_of_the_first(start):
    up = start()
    url = up.until("ready ")
    second = start()
    said = second.until("failure ")
    assert second.end() == 1
    assert str(up.process.pid) in said
    assert url in said
    assert up.stop() == 0


def test_two_homes_live_side_by_side(start, tmp_path):
    first, second = start(), start(home=tmp_path / "second")
    assert first.until("ready ") != second.until("ready ")
    assert (first.stop(), second.stop()) == (0, 0)


def test_a_home_path_too_long_for_a_socket_works(start, tmp_path):
    up = start(home=tmp_path / ("x" * 90) / ("z" * 60))
    up.until("ready ")
    folder = socket_path(up.home / "run").parent
    assert folder != up.home / "run"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert up.stop() == 0
    assert not folder.exists()


def test_an_external_redis_is_used_and_not_stopped(start, tmp_path):
    owner = start()
    owner.until("ready ")
    up = start(home=tmp_path / "second", REDIS_URL=owner.address.url + "?db=3")
    up.until("ready ")
    assert len(descendants(up.process.pid)) == 2
    assert up.stop() == 0
    with client(owner.address) as redis:
        assert redis.ping()
    assert owner.stop() == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"HOST": "0.0.0.0"}, "MILLSTREAM_ADMIN_KEY"),
        ({"HOST": "no.such.host.invalid"}, "not an address"),
        ({"POOLS": "cpu"}, "NAME=WORKERS"),
        ({"POOLS": "cpu=0"}, "NAME=WORKERS"),
        ({"POOLS": "cpu=1,cpu=2"}, "named twice"),
        ({"REDIS_URL": "redis://127.0.0.1:1"}, "Redis at redis://127.0.0.1:1/0 cannot be used"),
        ({"REDIS_URL": "127.0.0.1"}, "Redis URL"),
    ],
)
def test_invalid_settings_fail_with_one_line(start, settings, says):
    up = start(**settings)
    assert says in up.until("failure ")
    assert up.end() == 1


def test_an_unwritable_home_is_rejected(start, tmp_path):
    (tmp_path / "file").write_text("")
    up = start(home=tmp_path / "file" / "home")
    assert "cannot be written" in up.until("failure ")


def test_a_port_in_use_is_rejected(start):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        up = start(HTTP_PORT=str(taken.getsockname()[1]))
        assert "is in use" in up.until("failure ")
        assert up.end() == 1


def test_a_child_that_keeps_dying_ends_the_start(start, tmp_path):
    (tmp_path / "file").write_text("")
    up = start(SHM_DIR=str(tmp_path / "file"))
    said = up.until("failure ")
    assert "does not start" in said
    assert "NotADirectoryError" in said
    assert up.end() == 1
