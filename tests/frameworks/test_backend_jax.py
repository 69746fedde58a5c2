"""What only the JAX backend has, beyond the contract of all backends (test_backends_of_jax.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.services.errors import Code, Failure
from millstream.workers.backends import get_backend
from tests.contract.backend_cases import signature, some
from tests.kit import jax_models

pytestmark = pytest.mark.frameworks


def _mlp_instance(folder: Path, rows: int | str = "b") -> Any:
    path = jax_models.mlp(folder / "mlp.jax", rows)
    shape = (-1 if isinstance(rows, str) else rows, 8)
    specs = signature([("x", "FP32", shape)], [("output_0", "FP32", (shape[0], 4))], batching=isinstance(rows, str))
    return get_backend("jax").load(path, specs, "cpu", 1)


def test_each_number_of_rows_has_the_answers_of_numpy(tmp_path: Path) -> None:
    instance = _mlp_instance(tmp_path)
    for rows in (1, 2, 3, 7, 8, 33):
        x = np.random.default_rng(rows).standard_normal((rows, 8)).astype(np.float32)
        (found,) = instance.run({"x": x})
        np.testing.assert_allclose(found, jax_models.mlp_answers(x), rtol=1e-5)


def test_rows_are_padded_so_that_few_programs_are_compiled(tmp_path: Path) -> None:
    instance = _mlp_instance(tmp_path)
    for rows in range(1, 17):
        instance.run({"x": np.ones((rows, 8), np.float32)})
    assert len(instance._program._programs) == 5  # 1, 2, 4, 8, 16


def test_the_number_of_programs_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.plugins.engines.jax.jax_program.PROGRAMS_MAX", 3)
    instance = _mlp_instance(tmp_path)
    for rows in (1, 2, 4, 8, 16, 32):
        instance.run({"x": np.ones((rows, 8), np.float32)})
    assert len(instance._program._programs) == 3


def test_sizes_that_the_function_refuses_are_not_padded_to(tmp_path: Path) -> None:
    """Rows are a multiple of three: four, the next power of two, is none."""
    path = jax_models.save(tmp_path / "threes.jax", lambda x: x + 1, ("float32", ("3*n", 2)))
    specs = signature([("x", "FP32", (-1, 2))], [("output_0", "FP32", (-1, 2))])
    instance = get_backend("jax").load(path, specs, "cpu", 1)
    for rows in (3, 6, 9):
        assert instance.run({"x": some("FP32", rows)})[0].tolist() == (some("FP32", rows) + 1).tolist()
    with pytest.raises(Failure) as caught:
        instance.run({"x": some("FP32", 4)})
    assert caught.value.code is Code.MODEL


def test_a_fixed_batch_runs_with_its_rows_alone(tmp_path: Path) -> None:
    instance = _mlp_instance(tmp_path, rows=4)
    assert instance.run({"x": np.ones((4, 8), np.float32)})[0].shape == (4, 4)
    with pytest.raises(Failure):
        instance.run({"x": np.ones((3, 8), np.float32)})


@pytest.mark.parametrize("backend", ["jax", "iree"])
def test_a_worker_with_more_threads_answers_the_same(tmp_path: Path, backend: str) -> None:
    """In a process of its own, as its libraries have one thread pool each; `prepare` comes first, as in a worker."""
    path = jax_models.cnn(tmp_path / "cnn.jax")
    code = f"""
import os, numpy as np
import subprocess
import sys
from pathlib import Path
from millstream.workers.backends import get_backend
from tests.contract.backend_cases import signature
of = signature([("x", "FP32", (-1, 16, 16, 3))], [("output_0", "FP32", (-1, 5))])
backend = get_backend({backend!r})
backend.prepare("cpu")
instance = backend.load(Path({str(path)!r}), of, "cpu", 3)
(found,) = instance.run({{"x": np.ones((2, 16, 16, 3), np.float32)}})
print(found.shape, os.environ.get("NPROC"))
"""
    environment = {name: value for name, value in os.environ.items() if name != "NPROC"}  # set by tests before this
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.split("\n")[0] == ("(2, 5) 3" if backend == "jax" else "(2, 5) None"), ended.stderr
