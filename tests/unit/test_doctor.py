"""`millstream doctor` on this machine, and on machines that lack a requirement."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from millstream.services.cli.commands import doctor
from millstream.services.sandbox import confine, landlock, seccomp
from millstream.services.settings import Settings, child_environment

ROOT = Path(__file__).parents[2]


def states(settings: Settings) -> dict[str, str]:
    return {check.name: check.state for check in doctor.run_checks(settings)}


def test_doctor_prints_text_and_json(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        command = [sys.executable, "-m", "millstream.services.cli", "doctor", *arguments]
        environment = child_environment({"MILLSTREAM_HOME": str(tmp_path), "NO_COLOR": "1"})
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
        "Landlock",
        "seccomp",
    }
    assert checks["Landlock"]["state"] == ("ok" if landlock.abi() else "warn")
    assert checks["seccomp"]["state"] == ("ok" if seccomp.is_supported() else "warn")
    assert all(bool(check["advice"]) == (check["state"] != "ok") for check in checks.values())
    shown = run()
    assert all(name in shown for name in checks)


def test_missing_kernel_features_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confine, "probe", lambda: confine.Layers(0, False))
    found = states(Settings())
    assert (found["Landlock"], found["seccomp"]) == ("warn", "warn")


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
    assert states(Settings.model_validate({"redis_url": "redis://elsewhere"}))["Redis"] == "ok"


def test_a_gpu_that_the_driver_does_not_know_is_a_warning() -> None:
    checks = {check.name: check for check in doctor.run_checks(Settings(pools="gpu=1,device=cuda:7"))}
    assert (checks["GPU"].state, checks["GPU"].detail) == ("warn", "cuda:7 is not known to the driver")
    assert "GPU" not in states(Settings(pools="gpu=1,device=cpu"))
