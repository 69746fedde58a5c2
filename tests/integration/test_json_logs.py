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

import httpx2
import pytest

from millstream.services.environment import child_environment
from tests.kit.wait import wait_until

WAIT_S = 240
KEY = "a-key-from-a-file"
MODEL = Path(__file__).parents[2] / "examples/digits/digits.onnx"


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

    def about(self, change: str) -> dict[str, Any]:
        """Return the record of a change, or of one that failed."""
        found = [record for record in self.records if record.get("fields", {}).get("change") == change]
        assert len(found) == 1, (change, self.records)
        return found[0]

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
    assert httpx2.get(f"{url}/admin/v1/workers", timeout=WAIT_S).status_code == 401
    workers = httpx2.get(f"{url}/admin/v1/workers", headers={"Authorization": f"Bearer {KEY}"}, timeout=WAIT_S)
    assert len(workers.json()["workers"]) == 1
    os.kill(up.pid("cpu-0"), signal.SIGKILL)
    assert up.until("cpu-0 was ended by SIGKILL")["level"] == "WARNING"
    up.until("cpu-0 started")
    assert up.stop() == ""
    names = {"supervisor", "redis", "gateway-0", "cpu-0"}
    assert {record["process"] for record in up.records} == names
    assert up.records[-1]["message"].startswith("stopped")
    start = up.records[0]
    assert start["message"].startswith("supervisor of Millstream ")
    assert start["fields"]["admin_key"] == "(set)"
    logs = up.home / "logs"
    for log in logs.iterdir():
        assert KEY not in log.read_text()
        for line in log.read_text().splitlines():
            assert {"time", "level", "message", "process", "pid"} <= json.loads(line).keys()
    assert {log.name for log in logs.iterdir()} == {f"{name}.log" for name in names}


@pytest.mark.parametrize(
    ("log_format", "redirection"), [("json", "<&- >&- 2>&-"), ("text", "<&- >&- 2>&-"), ("json", "> /dev/full")]
)
def test_it_serves_where_standard_output_cannot_be_written(log_format: str, redirection: str, tmp_path: Path) -> None:
    home = tmp_path / "home"
    command = [sys.executable, "-P", "-m", "millstream.services.cli", "up", "--http-port", "0", "--grpc-port", "-1"]
    environment = child_environment({"MILLSTREAM_HOME": str(home), "MILLSTREAM_LOG_FORMAT": log_format})
    process = subprocess.Popen(["sh", "-c", f'exec "$@" {redirection}', "sh", *command], env=environment)
    try:
        log = home / "logs/supervisor.log"
        wait_until(lambda: log.exists() and "ready http://" in log.read_text(), WAIT_S)
        url = (home / "run/url").read_text().strip()
        wait_until(lambda: httpx2.get(f"{url}/v2/health/ready", timeout=WAIT_S).status_code == 200)
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.wait()


def test_what_an_operator_changes_is_logged_with_who_did_it(up: Up) -> None:
    url = up.until("ready ")["message"].split()[1]
    with httpx2.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, timeout=WAIT_S) as client:
        versions = "/admin/v1/models/m/versions"
        for rows in (1, 2):
            params = {"wait": str(WAIT_S - 60), "config": f'{{"rows_max": {rows}}}'}
            assert client.post(versions, content=MODEL.read_bytes(), params=params).status_code == 201
        assert client.post(versions, content=b"no\x1b[2J\nmodel").status_code == 400
        assert client.post(f"{versions}/1/activate").status_code == 200
        assert client.post(f"{versions}/9/activate").status_code == 404
        assert client.delete(f"{versions}/2").status_code == 204
        assert client.delete("/admin/v1/models/m", headers={"X-Request-Id": "id-of-caller"}).status_code == 204
        assert client.post("/v2/trace/setting", json={"trace_rate": "7"}).status_code == 200
        assert client.post("/v2/logging", json={"log_verbose_level": 0}).status_code == 200
        for _ in range(5):
            assert client.get("/admin/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
    up.until("unloaded: m version 1")
    assert up.stop() == ""
    uploads = [record for record in up.records if record["message"].startswith("uploaded: m")]
    assert [record["fields"]["version"] for record in uploads] == [1, 2]
    assert uploads[0]["model"] == "m"
    assert uploads[0]["fields"]["by"] == "admin key, 127.0.0.1"
    assert uploads[0]["message"].endswith("(by admin key, 127.0.0.1)")
    assert up.about("upload")["fields"]["code"] == "invalid"
    assert up.about("activated")["fields"]["version"] == 1
    assert up.about("activate")["fields"]["code"] == "not_found"
    assert up.about("trace settings changed")["fields"]["trace_rate"] == "7"
    assert up.about("log settings changed")["level"] == "INFO"
    deleted = [record for record in up.records if record["message"].startswith("deleted: m")]
    assert len(deleted) == 2
    assert deleted[1]["request_id"] == "id-of-caller"
    assert all(record["request_id"] for record in (*uploads, *deleted))
    assert not [
        r
        for r in up.records
        if r["process"] == "gateway-0" and r["logger"] == "millstream.producer" and "request_id" in r
    ]
    messages = [(record["process"], record["message"]) for record in up.records]
    for message in ("loading: m version 1", "ready: m version 2", "unloaded: m version 1"):
        assert ("cpu-0", message) in messages
    refused = [record["fields"] for record in up.records if record["logger"] == "millstream.refusals"]
    assert {one["reason"] for one in refused} == {"not_authorized"}
    assert sum(one["count"] for one in refused) == 5, "one line a minute"
    assert any(process == "gateway-0" and message.startswith("listens on 127.0.0.1:") for process, message in messages)
    assert any(process == "gateway-0" and message.startswith("drained in ") for process, message in messages)


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
