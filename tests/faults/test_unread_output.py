"""Nobody reads what the processes say: the terminal is paused, or the supervisor is frozen. All of them go on."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx2

from tests.kit import models
from tests.kit.stack import CALL_S_MAX, WAIT_S, children, descendants, running_stack, sigstopped
from tests.kit.wait import wait_until

PAUSE, GO_ON = b"\x13", b"\x11"  # Ctrl-S, Ctrl-Q
LINES = 1500  # of a refused load each: more than a pipe or a terminal takes


class Terminal:
    """`millstream up` in a terminal that is read all the time, until it is paused."""

    def __init__(self, folder: Path) -> None:
        self.screen = b""
        self._master, slave = pty.openpty()
        arguments = ["--home", str(folder / "home"), "--http-port", "0", "--grpc-port", "-1", "--no-example"]
        arguments += ["--no-controller", "--drain-s", "10", "--preload", f"m={models.scale(folder / 'm.onnx')}"]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "millstream.services.cli", "up", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
        )
        os.close(slave)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with suppress(OSError):  # the other end is closed
            while data := os.read(self._master, 1 << 16):
                self.screen += data

    def type(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def url(self) -> str:
        found = wait_until(lambda: re.search(rb"ready (http://[\d.:]+)", self.screen), WAIT_S, "ready")
        return found[1].decode()

    def worker(self) -> int | None:
        """Return the pid of the worker, which may be a new one."""
        for pid in children(self.process.pid):
            with suppress(OSError):
                if b"millstream.workers" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
        return None

    def close(self) -> None:
        for pid in (*descendants(self.process.pid), self.process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        os.close(self._master)


@contextmanager
def terminal(folder: Path) -> Iterator[Terminal]:
    one = Terminal(folder)
    try:
        yield one
    finally:
        one.close()


def refuse_loads(client: httpx2.Client) -> None:
    """Have a gateway say LINES lines."""
    for _ in range(LINES):
        assert client.post(f"/v2/repository/models/{'x' * 60}/load").status_code >= 400
    assert client.get("/v2/health/live").status_code == 200


def test_a_paused_terminal_stops_nothing(tmp_path: Path) -> None:
    with terminal(tmp_path) as up, httpx2.Client(base_url=up.url(), timeout=CALL_S_MAX) as client:
        up.type(PAUSE)
        refuse_loads(client)
        first = up.worker()
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: up.worker() not in {None, first}, what="another worker")
        wait_until(lambda: client.get("/v2/models/m/ready").status_code == 200, what="it answers")
        up.process.send_signal(signal.SIGTERM)
        assert up.process.wait(WAIT_S) == 0


def test_a_terminal_that_goes_on_shows_what_happened(tmp_path: Path) -> None:
    with terminal(tmp_path) as up:
        up.url()
        up.type(PAUSE)
        first = up.worker()
        assert first is not None
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: up.worker() not in {None, first}, what="another worker")
        assert b"cpu-0" not in up.screen.partition(b"ready http")[2]
        up.type(GO_ON)
        wait_until(lambda: b"cpu-0" in up.screen.partition(b"ready http")[2], what="it is shown")
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(WAIT_S) == 0
        wait_until(lambda: b"stopped" in up.screen, what="it said so")


def test_a_frozen_supervisor_stops_no_gateway(tmp_path: Path) -> None:
    with running_stack(tmp_path, models={"m": models.scale(tmp_path / "m.onnx")}) as stack:
        with sigstopped(stack.process.pid):
            refuse_loads(stack.http)
        assert stack.http.post("/v2/repository/models/another/load").status_code >= 400  # it says so
        wait_until(lambda: "log lines were dropped" in stack.logs(), what="the gateway says what is lost")
