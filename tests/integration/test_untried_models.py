"""Models that need meaningful inputs (a Reshape's target, Split's sizes) and so run on no generated input are served.

The models, inputs and outputs are ONNX's own backend tests.
"""

from __future__ import annotations

import asyncio
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from millstream.services.ingest.check_process import check_in_place
from millstream.services.ingest.inspection import inspect
from millstream.services.ingest.report import CheckedModel, CheckTask
from millstream.services.model.agreement import agree
from millstream.services.settings import Settings
from millstream.workers.backends.onnxruntime import OnnxRuntime
from millstream.workers.models.profiler import measure

#: taken by every ONNX Runtime that is supported; the onnx package may write a newer one
IR_VERSION = 10

SPECIAL = [
    "test_affine_grid_2d",
    "test_affine_grid_3d_align_corners",
    "test_col2im",
    "test_col2im_5d",
    "test_reshape_extended_dims",
    "test_reshape_negative_extended_dims",
    "test_reshape_one_dim",
    "test_reshape_reduced_dims",
    "test_reshape_zero_and_negative_dim",
    "test_reshape_zero_dim",
    "test_slice",
    "test_slice_default_steps",
    "test_slice_neg_steps",
    "test_slice_negative_axes",
    "test_split_variable_parts_1d_opset13",
    "test_split_variable_parts_1d_opset18",
    "test_split_variable_parts_2d_opset13",
    "test_split_variable_parts_2d_opset18",
    "test_split_variable_parts_default_axis_opset13",
    "test_split_variable_parts_default_axis_opset18",
    "test_unsqueeze_three_axes",
    "test_unsqueeze_unsorted_axes",
]
#: the same through a checker process, which takes longer
PROCESSES = ["test_reshape_reduced_dims", "test_split_variable_parts_2d_opset18"]


@pytest.fixture(scope="module")
def cases() -> dict[str, Any]:
    from onnx.backend.test.case.node import collect_testcases

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # cases of other operators overflow on purpose
        return {case.name: case for case in collect_testcases(None) if case.name in SPECIAL}


def saved(case: Any, folder: Path) -> Path:
    folder.mkdir(parents=True)
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    model.ir_version = min(model.ir_version, IR_VERSION)
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder / "model.onnx"


def assert_served_alone(found: CheckedModel, path: Path, case: Any) -> None:
    """Assert that the version answers ONNX's own data without batching, and that its notes say it was not tried."""
    assert not found.signature.batching
    assert any(note.startswith("No generated input runs, so only requests will show") for note in found.notes)
    instance = OnnxRuntime().load(path, found.signature, "cpu", 1)
    assert measure(instance, found.signature, 8, 2.0).seconds == {}
    inputs, expected = case.data_sets[0]
    names = [spec.name for spec in found.signature.inputs]
    outputs = instance.run({name: np.asarray(array) for name, array in zip(names, inputs, strict=True)})
    for spec, actual, wanted in zip(found.signature.outputs, outputs, expected, strict=True):
        assert agree(spec.datatype, actual, np.asarray(wanted), 1e-4)
    instance.close()


@pytest.mark.parametrize("name", SPECIAL)
def test_a_model_that_runs_on_no_generated_input_is_served_without_batching(
    cases: dict[str, Any], tmp_path: Path, name: str
) -> None:
    path = saved(cases[name], tmp_path / "staging" / "source")
    task = CheckTask(
        folder=path.parent.parent, batching=None, unpacked_bytes_max=0, memory_bytes_max=0, cpu_s_max=0, rows_max=8
    )
    assert_served_alone(inspect(task, path), path, cases[name])


@pytest.mark.parametrize("name", PROCESSES)
def test_the_checker_process_decides_the_same(cases: dict[str, Any], tmp_path: Path, name: str) -> None:
    path = saved(cases[name], tmp_path / "models" / "1")
    found = asyncio.run(check_in_place(tmp_path / "models", "1/model.onnx", None, Settings(), 8))
    assert_served_alone(found, path, cases[name])
