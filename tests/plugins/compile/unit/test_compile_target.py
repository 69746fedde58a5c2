"""What every compile target must do. Those that need more than the ordinary environment: tests/frameworks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from millstream.plugins.compile.candidate import CompileOutcome, CompileTask, Subject
from millstream.plugins.compile.form_runner import compile_candidate
from millstream.plugins.compile.targets import TARGETS
from millstream.plugins.compile.targets.base import Target
from millstream.services.model.signature import Signature, TensorSpec
from tests.kit import compile_targets, models
from tests.kit.compile_targets import check_compiles, check_fails, samples, subject, task
from tests.kit.disk import small_disk

HERE = [target for target in TARGETS if target.available("cpu") is None and not target.experimental]
WRITING = [target for target in HERE if target.name.startswith("onnxruntime-int8")]
each = pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
each_here = pytest.mark.parametrize("target", HERE, ids=lambda target: target.name)
each_writing = pytest.mark.parametrize("target", WRITING, ids=lambda target: target.name)


@each
@pytest.mark.parametrize("device", ["cpu", "cuda:0", "tensorrt:0", "rocm:0", "tpu:0", "opencl:0"])
def test_it_is_available_or_says_why_not(target: Target, device: str) -> None:
    missing = target.available(device)
    if missing is not None:
        assert len(missing.why) > 10
        assert "\n" not in missing.why + missing.install
    assert target.backend
    assert all(path.is_absolute() for path in target.programs())


@each_here
def test_it_compiles_to_something_that_answers_as_the_version_does(target: Target, tmp_path: Path) -> None:
    check_compiles(target, tmp_path)


@pytest.mark.parametrize("target", [one for one in HERE if one.narrows is not None], ids=lambda target: target.name)
def test_a_version_that_may_compute_beyond_its_librarys_types_is_refused(target: Target, tmp_path: Path) -> None:
    of = subject(tmp_path)
    version = onnx.load(of.path)
    text = "g (int64[N] t) => (int64[N] ms) { ms = Mul(t, k) }"
    milliseconds = onnx.parser.parse_model('<ir_version: 8, opset_import: ["": 17]>' + text).graph
    for part in ("input", "output", "node"):
        getattr(version.graph, part).extend(getattr(milliseconds, part))
    version.graph.initializer.append(onnx.numpy_helper.from_array(np.array(1000), "k"))
    onnx.save(version, of.path)
    seconds = TensorSpec(name="t", datatype="INT64", shape=(-1,))
    signature = of.signature.model_copy(update={"inputs": (*of.signature.inputs, seconds)})
    of = of.model_copy(update={"signature": signature})
    given = tmp_path / "samples.npz"
    arrays: dict[str, Any] = {"input/image": compile_targets.images(8), "input/t": np.arange(8)}
    np.savez(given, **arrays)
    outcome = compile_candidate(task(of, target.candidates(of)[0], tmp_path / "out", given))
    assert outcome.compiled is None
    assert "narrower types than its own: integers of 't' at Mul (which computes 'ms')" in outcome.error


@each_writing
def test_a_compilation_that_needs_more_memory_than_it_may_use_is_an_error(target: Target, tmp_path: Path) -> None:
    check_fails(target, tmp_path, memory_bytes=32 << 20)


@each_writing
def test_a_compilation_that_writes_more_than_it_may_is_an_error(target: Target, tmp_path: Path) -> None:
    check_fails(target, tmp_path, written_bytes=1000)


@each_writing
def test_a_compilation_that_takes_too_long_is_ended(target: Target, tmp_path: Path) -> None:
    assert check_fails(target, tmp_path, seconds_max=0.05) == "it took longer than 0.05 s"


@each_writing
def test_a_full_disk_is_an_error(target: Target, tmp_path: Path) -> None:
    of, given = subject(tmp_path), samples(tmp_path / "samples.npz")
    candidate = target.candidates(of)[0]
    with small_disk(4 << 20) as disk:
        folder = disk.folder / "out"
        disk.seen(folder).mkdir()
        disk.fill(left_bytes=4096)
        made = CompileTask(subject=of, candidate=candidate, folder=folder, samples=given, seconds_max=60)
        ended = subprocess.run(
            [*disk.prefix, sys.executable, "-c", COMPILE],
            input=made.model_dump_json(),
            capture_output=True,
            text=True,
            check=True,
        )
        outcome = CompileOutcome.model_validate_json(ended.stdout)
        assert outcome.compiled is None
        assert "No space left" in outcome.error + outcome.stderr
        assert list(disk.seen(folder).iterdir()) == []
        disk.empty()


COMPILE = """
import sys
from millstream.plugins.compile.candidate import Subject
from millstream.plugins.compile.form_runner import compile_candidate
from millstream.plugins.compile.candidate import CompileTask
print(compile_candidate(CompileTask.model_validate_json(sys.stdin.read())).model_dump_json())
"""


@each_writing
def test_a_model_that_it_cannot_compile_is_an_error_with_the_reason(target: Target, tmp_path: Path) -> None:
    of, given = subject(tmp_path), samples(tmp_path / "samples.npz")
    of.path.write_bytes(b"\x08\x08no model")
    outcome = compile_candidate(task(of, target.candidates(of)[0], tmp_path / "out", given))
    assert outcome.compiled is None
    assert len(outcome.error) > 10
    assert list((tmp_path / "out").iterdir()) == []


@each_writing
def test_a_model_without_operators_to_quantize_is_refused(target: Target, tmp_path: Path) -> None:
    of = subject(tmp_path).model_copy(update={"path": models.blank(tmp_path / "blank.onnx")})
    given = samples(tmp_path / "samples.npz")
    outcome = compile_candidate(task(of, target.candidates(of)[0], tmp_path / "out", given))
    assert outcome.compiled is None


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (None, "it needs samples of inputs"),
        ({}, "the input 'image' is missing"),
        ({"input/image": compile_targets.images(2), "input/other": np.zeros(2)}, "there is no array 'other'"),
        ({"input/image": np.zeros((2, 3, 8, 8), "S1")}, "'image' has the datatype |S1 instead of FP32"),
        ({"input/image": np.zeros((2, 8), np.float32)}, "'image' has the shape [2, 8] instead of"),
        ({"input/image": compile_targets.images(0)}, "there are no rows"),
        ({"input/image": np.array([object()], dtype=object)}, "arrays (Object arrays"),
    ],
)
def test_wrong_samples_are_refused_with_the_line_to_fix(
    tmp_path: Path, arrays: dict[str, Any] | None, message: str
) -> None:
    of, path = subject(tmp_path), tmp_path / "samples.npz"
    if arrays is not None:
        np.savez(path, **arrays, allow_pickle=True)
    target = next(target for target in TARGETS if target.name == "onnxruntime-int8-static")
    made: CompileTask = task(of, target.candidates(of)[0], tmp_path / "out", path)
    outcome = compile_candidate(made.model_copy(update={"samples": path if arrays is not None else None}))
    assert message in outcome.error


def test_a_dynamically_quantized_form_may_only_run_single_rows(tmp_path: Path) -> None:
    of, given = subject(tmp_path), samples(tmp_path / "samples.npz")
    target = next(target for target in TARGETS if target.name == "onnxruntime-int8-dynamic")
    found = compile_targets.compiled(compile_candidate(task(of, target.candidates(of)[0], tmp_path / "out", given)))
    assert not found.rows_independent
    assert "for runs of one row only" in found.notes[-1]


def test_calibration_by_histograms_takes_fewer_rows_where_memory_is_short(tmp_path: Path) -> None:
    image = TensorSpec(name="data_0", datatype="FP32", shape=(-1, 3, 224, 224))
    scores = TensorSpec(name="scores", datatype="FP32", shape=(-1, 1000))
    of = Subject(
        path=models.squeezenet(tmp_path / "squeezenet.onnx"),
        source_format="onnx",
        signature=Signature(inputs=(image,), outputs=(scores,), batching=True),
        threads=1,
        device="cpu",
    )
    rows = np.random.default_rng(0).standard_normal((64, 3, 224, 224)).astype(np.float32)
    arrays: dict[str, Any] = {"input/data_0": rows}
    np.savez(tmp_path / "samples.npz", **arrays)
    target = next(target for target in TARGETS if target.name == "onnxruntime-int8-static")
    candidate = next(one for one in target.candidates(of) if one.flags["calibration"] == "percentile")
    made = task(of, candidate, tmp_path / "out", tmp_path / "samples.npz")

    outcome = compile_candidate(made.model_copy(update={"memory_bytes": 1300 << 20}))

    assert compile_targets.compiled(outcome).files == ("int8.onnx",)
    assert "\x1b" not in outcome.stderr
    assert "device discovery" not in outcome.stderr
