"""Memory of a GPU: what an instance takes is measured, unloading gives it back, and running out hurts one request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from millstream.services.device import find_device
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import OutOfMemory
from tests.contract.backend_cases import signature
from tests.kit import models

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

WEIGHT_BYTES = 256 << 20
ROUNDS = 10
COLUMN = signature([("x", "FP32", (-1, 1024))], [("y", "FP32", (-1, 1))])
COLUMNS = 1 << 20
BYTES_OF_NO_GPU = 1 << 40

#: In a process of its own: memory that CUDA keeps for the process is that of nobody else. Prints bytes after each step.
CYCLES = """
import sys
from pathlib import Path
import numpy as np
from millstream.services.model.signature import Signature
from millstream.workers.backends import get_backend

backend, path = get_backend("onnxruntime"), Path(sys.argv[1])
signature = Signature.model_validate_json(sys.argv[2])
print(backend.device_bytes("cuda:0"))
for _ in range(int(sys.argv[3])):
    instance = backend.load(path, signature, "cuda:0", 1)
    instance.run({"x": np.ones((4, 1024), np.float32)})
    print(backend.device_bytes("cuda:0"))
    instance.close()
    print(backend.device_bytes("cuda:0"))
"""


def test_bytes_are_measured_and_given_back(tmp_path: Path) -> None:
    path = models.heavy(tmp_path / "heavy.onnx", WEIGHT_BYTES)
    arguments = [str(path), COLUMN.model_dump_json(), str(ROUNDS)]
    done = subprocess.run([sys.executable, "-P", "-c", CYCLES, *arguments], capture_output=True, text=True, check=True)
    before, *steps = [int(line) for line in done.stdout.split()]
    loaded, closed = steps[::2], steps[1::2]
    assert before == 0, steps
    assert all(WEIGHT_BYTES <= one - after <= 2 * WEIGHT_BYTES for one, after in zip(loaded, closed, strict=True)), (
        steps
    )
    assert closed[-1] <= closed[0] * 1.1, steps


def test_a_run_that_needs_more_than_the_device_has_fails_alone(tmp_path: Path) -> None:
    backend = get_backend("onnxruntime")
    path = models.wide(tmp_path / "wide.onnx", COLUMNS)
    instance = backend.load(path, signature([("x", "FP32", (-1, 1))], [("y", "FP32", (-1, 1))]), "cuda:0", 1)
    for _ in range(3):
        with pytest.raises(OutOfMemory):
            instance.run({"x": np.ones((BYTES_OF_NO_GPU // (4 * COLUMNS), 1), np.float32)})
        assert instance.run({"x": np.ones((2, 1), np.float32)})[0].tolist() == [[COLUMNS], [COLUMNS]]


def test_the_device_is_described() -> None:
    found = find_device("cuda:0")
    assert found.kind == "gpu"
    assert found.name
    assert found.memory_bytes > 1 << 30
    assert float(found.compute_capability) >= 5
    assert found.driver
    assert found.fingerprint == find_device("cuda").fingerprint != find_device("cpu").fingerprint


def test_outputs_whose_shapes_depend_on_values_are_right_in_every_run(tmp_path: Path) -> None:
    path = models.blank(tmp_path / "blank.onnx")
    of = signature([("count", "INT64", (1,))], [("y", "FP32", (-1,))], batching=False)
    instance = get_backend("onnxruntime").load(path, of, "cuda:0", 1)
    for count in (1000, 2000, 10, 1000):
        assert instance.run({"count": np.array([count])})[0].shape == (count,)
