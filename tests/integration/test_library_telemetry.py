"""Nothing reports to makers of libraries: ONNX Runtime's packages do by default, and keep files in the user's home."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from millstream.services.environment import ORT_DISABLE_TELEMETRY, child_environment
from tests.kit.command_line import DIGITS, Millstream, end, until

#: how the library behaves unless told otherwise
SESSION = "import sys, onnxruntime; onnxruntime.InferenceSession(sys.argv[1])"


class AtHome(Millstream):
    """Runs commands as a user whose home is the folder around that of Millstream."""

    def environment(self) -> dict[str, str]:
        without = frozenset({"XDG_CACHE_HOME", ORT_DISABLE_TELEMETRY, "CI"})  # CI turns it off, too
        return child_environment({**super().environment(), "HOME": str(self.home.parent)}, without)


def left_in(home: Path) -> list[str]:
    return [path.name for path in (home / ".cache").rglob("*") if path.is_file() and "Microsoft" in path.parts]


def test_the_check_and_the_worker_leave_no_telemetry(tmp_path: Path) -> None:
    millstream = AtHome(tmp_path / "millstream")
    with millstream.up("--pool", "cpu=1,threads=1") as process:
        until(process, "ready ")
        millstream.ok("push", "mine", DIGITS / "digits.onnx", "--wait")
        assert end(process) == 0
    assert left_in(tmp_path) == []


def test_the_library_alone_would(tmp_path: Path) -> None:
    """Else the test above shows nothing: then ONNX Runtime has changed, and what disables its telemetry may have."""
    command = [sys.executable, "-P", "-c", SESSION, str(DIGITS / "digits.onnx")]
    environment = AtHome(tmp_path / "millstream").environment()
    subprocess.run(command, env=environment, check=True, timeout=120)
    if not left_in(tmp_path):
        pytest.fail("ONNX Runtime keeps no files for telemetry any more: look at docs/Privacy.md of this version")
