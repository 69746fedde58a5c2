"""A backend whose library could not be imported for want of memory loads models once there is memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from millstream.services.environment import child_environment
from tests.kit import models

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits the address space as Linux does")

#: imports a library in ever more memory, from next to nothing to enough, and then loads and runs a model
PROGRAM = """
import resource, sys
from pathlib import Path

import numpy as np

from millstream.services.errors import Failure
from millstream.services.model.signature import Signature, TensorSpec
from millstream.workers.backends import get_backend

name, path = sys.argv[1], Path(sys.argv[2])
backend = get_backend(name)
refused = 0
for room in (1 << 20, 4 << 20, 8 << 20, 16 << 20):
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
    try:
        backend.prepare("cpu")
    except (Failure, MemoryError):
        refused += 1
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
backend.prepare("cpu")
spec = {"datatype": "FP32", "shape": (-1, 2)}
signature = Signature(inputs=(TensorSpec(name="x", **spec),), outputs=(TensorSpec(name="y", **spec),), batching=True)
instance = backend.load(path, signature, "cpu", 1)
rows = np.ones((3, 2), np.float32)
assert instance.run({"x": rows})[0].tolist() == rows.tolist()
print(refused)
"""


@pytest.mark.plugins
@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_an_import_that_found_no_memory_is_tried_again(backend: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    model = models.identity(tmp_path / "model.onnx", "FP32")
    done = subprocess.run(
        [sys.executable, tmp_path / "program.py", backend, model],
        env=child_environment({}),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
