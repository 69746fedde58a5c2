"""The JAX backend: the contract of all backends, and what only it has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.services.errors import Code, Failure
from millstream.services.model.datatypes import NUMPY
from millstream.workers.backends import get_backend
from tests.contract import test_backend as contract
from tests.contract.backend_cases import Case, same, signature, some
from tests.kit import jax_models

pytestmark = pytest.mark.frameworks

JAX = Case(
    "jax",
    lambda folder, datatype: jax_models.identity(folder / "identity.jax", datatype),
    tuple(NUMPY),
    weighty=lambda folder, size_bytes: jax_models.weighty(folder / "weighty.jax", size_bytes),
    threads=False,  # they are the process's
)  # endless: XLA ends no run


@pytest.fixture
def case() -> Case:
    return JAX


test_datatypes = contract.test_a_datatype_comes_back_as_it_went_in_or_is_refused
test_arrays = contract.test_arrays_that_are_read_only_or_not_in_order_are_taken
test_outputs = contract.test_outputs_share_no_memory_with_inputs_or_with_the_next_run
test_batches = contract.test_batches_of_changing_size_run
test_wrong_inputs = contract.test_wrong_inputs_are_a_failure_of_the_model_and_the_next_run_works
test_missing = contract.test_a_missing_input_is_named_so
test_deleted = contract.test_a_file_that_was_deleted_meanwhile_is_a_failure_of_the_model
test_no_model = contract.test_a_file_that_is_no_model_is_refused
test_closed = contract.test_a_closed_instance_refuses_to_run_and_closing_twice_is_harmless
test_rebuilt = contract.test_a_rebuilt_instance_runs
test_options = contract.test_an_option_that_a_backend_does_not_know_is_refused
test_ended_load = contract.test_a_load_ends_if_its_end_was_requested


def test_a_device_that_it_cannot_use_is_refused(tmp_path: Path) -> None:
    path = JAX.identity(tmp_path, "FP32")
    for device in ("tpu", "cuda:99"):
        with pytest.raises(Failure, match=device) as caught:
            get_backend("jax").load(path, same(), device, 1)
        assert caught.value.code is Code.UNAVAILABLE


def test_loading_and_closing_gives_memory_back(tmp_path: Path) -> None:
    contract.test_loading_and_closing_gives_memory_back(JAX, tmp_path)


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
    monkeypatch.setattr("millstream.services.jax_export.jax_program.PROGRAMS_MAX", 3)
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
