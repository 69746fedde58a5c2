"""A tree without plug-ins: `millstream up` starts, takes an ONNX model and answers over REST and gRPC."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton_grpc

from millstream import Client
from tests.kit import models
from tests.kit.stack import CALL_S_MAX, running_stack

ROOT = Path(__file__).parents[2]
CORE = ("src", "gateway", "workers", "services", "client", "examples")
_PLUGINS = re.compile(r'(\[project\.entry-points\."millstream\.plugins"\]\n)(?:[\w-]+ = .*\n)+')


def core_alone(folder: Path) -> Path:
    """Copy the tree without its plug-ins. Returns what PYTHONPATH names."""
    for name in CORE:
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "src" / "millstream" / "plugins").unlink()
    project = (ROOT / "pyproject.toml").read_text()
    without, count = _PLUGINS.subn(r"\1", project)
    assert count == 1
    (folder / "pyproject.toml").write_text(without)
    return folder / "src"


def test_the_core_serves_onnx_without_any_plug_in(tmp_path: Path) -> None:
    tree = core_alone(tmp_path / "tree")
    rows = np.arange(8, dtype=np.float32).reshape(2, 4)
    with running_stack(tmp_path / "stack", gateways=2, environment={"PYTHONPATH": str(tree)}) as stack:
        file = models.scale(tmp_path / "scale.onnx", 2.0, 4)
        with Client(stack.url, key=stack.key) as client:
            client.push("scale", file, wait_s=CALL_S_MAX)
            np.testing.assert_array_equal(client.predict("scale", rows)["y"], rows * 2)
        assert stack.http.get("/metrics").status_code == 200
        assert stack.http.get("/v1/models/scale").status_code == 404, "a protocol that went with its folder"
        with triton_grpc.InferenceServerClient(stack.grpc) as grpc:
            tensor = triton_grpc.InferInput("x", [2, 4], "FP32")
            tensor.set_data_from_numpy(rows)
            answer = grpc.infer("scale", [tensor], client_timeout=CALL_S_MAX).as_numpy("y")
            np.testing.assert_array_equal(answer, rows * 2)


@pytest.mark.timeout(1200)  # four minutes of its own; the files beside it share the cores
def test_the_tests_of_the_core_pass_without_any_plug_in(tmp_path: Path) -> None:
    """Those that start nothing, but for the slowest, which plug-ins do not touch."""
    folder = tmp_path / "tree"
    tree = core_alone(folder)
    for name in ("tests", "docs", "deploy"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "plugins"))
    shutil.copytree(ROOT / "tests/kit/plugins", folder / "tests/kit/plugins")  # a test's own plug-in, of a backend
    for path in (*ROOT.glob("*.md"), *ROOT.glob("*.yml"), ROOT / "Makefile"):
        shutil.copy(path, folder / path.name)
    left_out = [f"--ignore=tests/unit/{name}" for name in ("http2", "test_digits.py", "test_explore.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "2", "tests/unit", *left_out],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) > 2000, done.stdout[-300:]
