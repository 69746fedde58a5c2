"""`millstream doctor` on this machine, and on machines that lack a requirement."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from millstream.services.cli.commands import doctor
from millstream.services.cli.doctor import machine
from millstream.services.cli.doctor.machine import Check, machine_checks
from millstream.services.cli.doctor.redis import checks_of, redis_checks
from millstream.services.environment import child_environment
from millstream.services.queue.server import choose_binary
from millstream.services.queue.server_facts import RedisFacts
from millstream.services.queue.url import client
from millstream.services.sandbox import confine, landlock, seccomp
from millstream.services.settings import Settings
from tests.kit.fleet import PROGRAMS, fleet
from tests.kit.redis_server import redis_server
from tests.kit.wait import wait_until

#: Other tests may have any port.
NO_PORTS = {"MILLSTREAM_HTTP_PORT": "0", "MILLSTREAM_GRPC_PORT": "-1"}
ROOT = Path(__file__).parents[2]


def states(settings: Settings) -> dict[str, str]:
    return {check.name: check.state for check in doctor.run_checks(settings)}


def test_doctor_prints_text_and_json(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "millstream.services.cli", "doctor", *arguments]
        environment = child_environment({"MILLSTREAM_HOME": str(tmp_path), "NO_COLOR": "1"} | NO_PORTS)
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    checks = {check["name"]: check for check in json.loads(run("--json"))["checks"]}
    assert set(checks) == {
        "Python",
        "Packages",
        "ONNX Runtime",
        "Processor",
        "Redis",
        "Shared memory",
        "Open files",
        "Processes",
        "Disk",
        "Landlock",
        "seccomp",
        "Uploads",
    }
    assert checks["Landlock"]["state"] == ("ok" if landlock.abi() else "warn")
    assert checks["seccomp"]["state"] == ("ok" if seccomp.is_supported() else "warn")
    assert all(bool(check["advice"]) == (check["state"] != "ok") for check in checks.values())
    shown = run()
    assert all(name in shown for name in checks)


def test_missing_kernel_features_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confine, "probe", lambda: confine.Layers(0, False, False))
    found = states(Settings())
    assert (found["Landlock"], found["seccomp"]) == ("warn", "warn")


def test_namespaces_take_the_place_of_landlock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confine, "probe", lambda: confine.Layers(0, True, True))
    assert states(Settings())["Landlock"] == "ok"


def test_a_broken_sandbox_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> confine.Layers:
        raise OSError(7, "too many layers")

    monkeypatch.setattr(confine, "probe", broken)
    assert states(Settings())["Sandbox"] == "fail"


def test_small_limits_are_warnings(tmp_path: Path) -> None:
    greedy = Settings(gateways=64, shm_bytes_max=1 << 50, client_connections_max=1 << 40, shm_dir=tmp_path)
    found = states(greedy)
    assert (found["Shared memory"], found["Open files"]) == ("warn", "warn")
    assert states(Settings(shm_dir=tmp_path / "missing"))["Shared memory"] == "warn"


def test_a_missing_redis_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert states(Settings())["Redis"] == "fail"
    gone = Settings.model_validate({"redis_url": f"unix://:secret@{tmp_path}/gone.sock"})
    [redis] = [check for check in doctor.run_checks(gone) if check.name == "Redis"]
    assert redis.state == "fail"
    assert "gone.sock" in redis.detail
    assert "secret" not in redis.detail


def test_a_gpu_that_the_driver_does_not_know_is_a_warning() -> None:
    checks = {check.name: check for check in doctor.run_checks(Settings(pools="gpu=1,device=cuda:7"))}
    assert (checks["GPU"].state, checks["GPU"].detail) == ("warn", "cuda:7 is not known to the driver")
    assert "GPU" not in states(Settings(pools="gpu=1,device=cpu"))


@contextmanager
def redis_states(folder: Path, *options: str, url: str = "") -> Iterator[dict[str, Check]]:
    """The checks of a Redis of its own, with these options."""
    folder.mkdir()
    with redis_server(choose_binary(""), folder, *options) as address:
        settings = Settings.model_validate({"redis_url": url or address.url})
        yield {check.name: check for check in redis_checks(settings)}


def test_a_redis_that_is_right(tmp_path: Path) -> None:
    with redis_states(tmp_path / "redis") as found:
        assert {name: check.state for name, check in found.items() if name != "Redis latency"} == {
            "Redis": "ok",
            "Redis memory": "ok",
            "Clock": "ok",
        }
        assert "no limit" in found["Redis memory"].detail


def test_a_redis_that_deletes_keys_is_a_warning(tmp_path: Path) -> None:
    with redis_states(tmp_path / "lru", "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru") as found:
        assert found["Redis memory"].state == "warn"
        assert "config set maxmemory-policy noeviction" in found["Redis memory"].advice
    with redis_states(tmp_path / "full", "--maxmemory", "600kb") as found:
        assert found["Redis memory"].state == "warn"
        assert "raise maxmemory" in found["Redis memory"].advice


def test_a_replica_is_a_failure(tmp_path: Path) -> None:
    with redis_states(tmp_path / "replica", "--replicaof", "127.0.0.1", "1") as found:
        assert (found["Redis"].state, "a replica" in found["Redis"].detail) == ("fail", True)


def test_a_wrong_password_is_a_failure_that_does_not_show_it(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    with redis_server(choose_binary(""), tmp_path / "redis") as address:
        with client(address) as redis:
            redis.config_set("requirepass", "right")
        settings = Settings.model_validate({"redis_url": f"unix://:wr0ng@{address.path}"})
        [found] = redis_checks(settings)
    assert found.state == "fail"
    assert "wr0ng" not in f"{found.detail} {found.advice}"


def test_a_redis_user_who_may_not_ask_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "redis").mkdir()
    with redis_server(choose_binary(""), tmp_path / "redis") as address:
        with client(address) as redis:
            redis.execute_command("ACL", "SETUSER", "default", "-info")
        settings = Settings.model_validate({"redis_url": address.url})
        found = {check.name: check.state for check in redis_checks(settings)}
    assert (found["Redis"], found["Clock"]) == ("warn", "ok")
    assert "Redis memory" not in found


FACTS = RedisFacts("7.2.4", "master", 0.001, 0.0, 1, 0, "noeviction", cluster=False)


def test_what_a_redis_far_away_or_of_old_lacks() -> None:
    def found(**facts: Any) -> dict[str, str]:
        return {check.name: check.state for check in checks_of(FACTS._replace(**facts), "redis://r:6379/0")}

    assert set(found().values()) == {"ok"}
    assert found(version="6.2.14")["Redis"] == "fail"
    assert found(version="8.0")["Redis"] == "ok"
    assert found(cluster=True)["Redis"] == "fail"
    assert found(latency_s=0.02)["Redis latency"] == "warn"
    assert [found(clock_ahead_s=ahead)["Clock"] for ahead in (-31, -1, 1, 31)] == ["warn", "ok", "ok", "warn"]


def test_a_port_that_is_taken_is_a_warning(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for name in ("http_port", "grpc_port"):
            settings = Settings.model_validate({"home": tmp_path, "http_port": 0, "grpc_port": -1} | {name: port})
            [check] = [one for one in machine_checks(settings) if one.name.startswith("Port")]
            assert (check.name, check.state) == (f"Port {port}", "warn")
            assert "is in use" in check.detail


def test_a_home_that_cannot_be_written_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    assert states(Settings(home=tmp_path / "file" / "home"))["Disk"] == "fail"
    assert states(Settings(home=tmp_path / "a" / "b"))["Disk"] == "ok"
    monkeypatch.setattr(machine, "DISK_FREE_BYTES_MIN", 1 << 60)
    assert states(Settings(home=tmp_path))["Disk"] == "warn"


@pytest.mark.parametrize(("limit", "state"), [("max", "ok"), ("1000", "ok"), ("150", "warn")])
def test_a_control_group_with_few_processes_is_a_warning(tmp_path: Path, limit: str, state: str) -> None:
    (tmp_path / "pids.max").write_text(f"{limit}\n")
    (tmp_path / "pids.current").write_text("90\n")
    assert machine._processes(Settings(pools="cpu=1"), tmp_path).state == state


def test_a_machine_whose_clock_is_wrong_is_told(tmp_path: Path) -> None:
    """A gateway that is right, a worker 31 s ahead, and this machine, for doctor, an hour behind."""
    (tmp_path / "redis").mkdir()
    with (
        redis_server(choose_binary(""), tmp_path / "redis") as address,
        fleet(tmp_path / "fleet", address) as machines,
    ):
        http = machines.gateway()
        machines.worker(ahead_s=31)
        wait_until(lambda: machines.workers(http), what="a worker")
        names = {"HOME": str(tmp_path / "home"), "REDIS_URL": address.url, "ENDPOINT": str(http.base_url).rstrip("/")}
        names["ADMIN_KEY"] = http.headers["Authorization"].removeprefix("Bearer ")
        done = subprocess.run(
            [sys.executable, PROGRAMS / "skewed.py", "-3600", "millstream.services.cli", "doctor", "--json"],
            env=child_environment({f"MILLSTREAM_{name}": value for name, value in names.items()} | NO_PORTS),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    found = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert found["Worker clock"]["state"] == found["Clock"]["state"] == "warn"
    assert "31 s ahead of" in found["Worker clock"]["detail"]
    assert "3,600 s behind" in found["Clock"]["detail"]
