"""`millstream doctor devices`: every compile target, what keeps it from being used, and what to install."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from millstream.plugins.compile.targets import TARGETS
from millstream.services.environment import child_environment

ROOT = Path(__file__).parents[4]


def run(folder: Path, *arguments: str, plugins: str = "all") -> str:
    command = [sys.executable, "-m", "millstream.services.cli", "doctor", "devices", *arguments]
    named = {"MILLSTREAM_HOME": str(folder), "NO_COLOR": "1", "MILLSTREAM_PLUGINS": plugins}
    return subprocess.run(
        command, cwd=ROOT, env=child_environment(named), capture_output=True, text=True, timeout=120, check=True
    ).stdout


def test_every_target_is_named_with_what_it_lacks(tmp_path: Path) -> None:
    checks = json.loads(run(tmp_path, "--json"))["checks"]
    assert [check["name"] for check in checks] == [target.name for target in TARGETS]
    usable = {check["name"] for check in checks if check["state"] == "ok"}
    assert usable >= {"onnxruntime", "onnxruntime-int8-static", "openvino"}
    assert all(check["detail"] for check in checks)
    text = run(tmp_path)
    assert "ok    onnxruntime-int8-static  cpu" in text
    assert all(check["advice"] in text for check in checks)


def test_without_the_plugin_there_is_no_target(tmp_path: Path) -> None:
    assert json.loads(run(tmp_path, "--json", plugins="-compile")) == {"checks": []}
