"""`millstream up` with JSON logs, as a container platform starts it: PORT, a key from a file, standard output."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.services.settings import child_environment

WAIT_S = 120
KEY = "a-key-from-a-file"


class Up:
    """`millstream up` with its standard output, which consists of log records."""

    def __init__(self, folder: Path, *options: str, **environment: str) -> None:
        self.home = folder / "home"
        key = folder / "key"
        key.write_text(KEY + "\n")
        variables = {
            "MILLSTREAM_HOME": str(self.home),
            "MILLSTREAM_ADMIN_KEY_FILE": str(key),
            "MILLSTREAM_GRPC_PORT": "0",
            "MILLSTREAM_LOG_FORMAT": "json",
            "PORT": "0",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "millstream.services.cli", "up", *options],
            env=child_environment(variables | environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.records: list[dict[str, Any]] = []

    def until(self, message: str) -> dict[str, Any]:
        """Read records up to one whose message begins with `message`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.records.append(json.loads(line))
            if self.records[-1]["message"].startswith(message):
                return self.records[-1]
        raise AssertionError(f"no {message!r} in {self.records}")

    def stop(self) -> str:
        """Stop it; return its standard error."""
        self.process.send_signal(signal.SIGTERM)
        out, err = self.process.communicate(timeout=WAIT_S)
        self.records += map(json.loads, out.splitlines())
        assert self.process.returncode == 0
        return err

    def pid(self, process: str) -> int:
        return next(int(r["pid"]) for r in self.records if r["process"] == process)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    up = Up(tmp_path)
    yield up
    if up.process.poll() is None:
        up.process.kill()
    up.process.communicate()


def test_standard_output_is_json_of_all_processes_and_the_key_is_the_file(up: Up) -> None:
    url = up.until("ready ")["message"].split()[1]
    assert httpx.get(f"{url}/admin/v1/workers", timeout=WAIT_S).status_code == 401
    workers = httpx.get(f"{url}/admin/v1/workers", headers={"Authorization": f"Bearer {KEY}"}, timeout=WAIT_S)
    assert len(workers.json()["workers"]) == 1
    os.kill(up.pid("cpu-0"), signal.SIGKILL)
    assert up.until("cpu-0 was ended by SIGKILL")["level"] == "WARNING"
    up.until("cpu-0 started")
    assert up.stop() == ""
    assert {record["process"] for record in up.records} == {"supervisor", "redis", "gateway-0", "cpu-0"}
    assert up.records[-1]["message"].startswith("stopped")
    start = up.records[0]
    assert start["message"].startswith("Millstream ")
    assert start["fields"]["admin_key"] == "(set)"
    logs = up.home / "logs"
    for log in logs.iterdir():
        assert KEY not in log.read_text()
        for line in log.read_text().splitlines():
            assert {"time", "level", "message", "process", "pid"} <= json.loads(line).keys()
    assert {log.name for log in logs.iterdir()} == {"supervisor.log", "redis.log", "gateway-0.log", "cpu-0.log"}


def test_a_process_that_cannot_start_says_so_in_json(tmp_path: Path) -> None:
    for module in ("millstream.gateway", "millstream.workers"):
        done = subprocess.run(
            [sys.executable, "-P", "-m", module],
            env=child_environment({"MILLSTREAM_HOME": str(tmp_path), "MILLSTREAM_LOG_FORMAT": "json"}),
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )
        assert (done.returncode, done.stderr) == (1, "")
        record = json.loads(done.stdout)
        assert record["level"] == "CRITICAL"
        assert "MILLSTREAM_REDIS_URL" in record["message"]
