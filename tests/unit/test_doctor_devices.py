"""`millstream doctor devices` on this machine, and the parts that find what other machines have."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from millstream.plugins.compile import devices
from millstream.plugins.compile.targets import TARGETS
from millstream.services.device import FEATURES
from millstream.services.environment import child_environment

ROOT = Path(__file__).parents[2]


def run(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "millstream.services.cli", "doctor", "devices", *arguments]
    environment = child_environment({"MILLSTREAM_HOME": str(folder), "NO_COLOR": "1"})
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=True
    ).stdout


def test_json_names_the_processor_and_every_target(tmp_path: Path) -> None:
    report = json.loads(run(tmp_path, "--json"))
    processor = report["processor"]
    assert processor["architecture"] == platform.machine()
    assert 0 < processor["cores"] <= (os.cpu_count() or 1)
    assert processor["memory_bytes"] > 1 << 28
    assert processor["numa_nodes"] >= 1
    assert [target["target"] for target in report["targets"]] == [target.name for target in TARGETS]
    usable = {target["target"] for target in report["targets"] if target["usable"]}
    assert usable >= {"onnxruntime", "onnxruntime-int8-static", "openvino"}
    assert all(target["why"] for target in report["targets"] if not target["usable"])


def test_text_says_what_is_missing_and_what_to_install(tmp_path: Path) -> None:
    text = run(tmp_path)
    assert "Instructions" in text
    assert "onnxruntime-int8-static  cpu" in text
    assert "migraphx" in text
    for target in json.loads(run(tmp_path, "--json"))["targets"]:
        assert target["install"] in text


def test_instructions_are_those_that_a_processor_is_asked_for() -> None:
    assert {flag for flags in devices.INSTRUCTIONS.values() for flag in flags} <= {*FEATURES}


def test_numa_nodes_are_counted(tmp_path: Path) -> None:
    for name in ("node0", "node1", "nodes", "has_cpu"):
        (tmp_path / name).mkdir()
    assert devices.numa_nodes(tmp_path) == 2
    assert devices.numa_nodes(tmp_path / "none") == 1
