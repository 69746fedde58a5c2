"""Programs of torch.export, compiled by AOTInductor in the sandbox, answer as PyTorch does."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from millstream.plugins.compile.candidate import Compiled, CompileOutcome, CompileTask, Subject
from millstream.plugins.compile.form_runner import compile_candidate
from millstream.plugins.compile.targets import get_target
from millstream.services.errors import Failure
from millstream.services.model.signature import Signature, TensorSpec
from millstream.workers.backends import get_backend

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks
SIGNATURE = Signature(
    inputs=(
        TensorSpec(name="x", datatype="FP32", shape=(-1, 64)),
        TensorSpec(name="scale", datatype="FP32", shape=(-1, 1)),
    ),
    outputs=(TensorSpec(name="output_0", datatype="FP32", shape=(-1, 10)),),
    batching=True,
)


class Scaled(torch.nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden, self.out = torch.nn.Linear(64, 32), torch.nn.Linear(32, 10)

    def forward(self, x, *, scale):
        return self.out(torch.relu(self.hidden(x))) * scale


def subject(folder: Path) -> Subject:
    rows = torch.export.Dim("rows", min=1, max=64)
    exported = torch.export.export(
        Scaled().eval(),
        (torch.randn(2, 64),),
        {"scale": torch.randn(2, 1)},
        dynamic_shapes={"x": {0: rows}, "scale": {0: rows}},
    )
    torch.export.save(exported, folder / "model.pt2")
    return Subject(path=folder / "model.pt2", source_format="torch-export", signature=SIGNATURE)


def compile_it(of: Subject, folder: Path, **changes: object) -> CompileOutcome:
    folder.mkdir()
    candidate = get_target("aotinductor").candidates(of)[0]
    task = CompileTask(subject=of, candidate=candidate, folder=folder, seconds_max=550, low_priority=False)
    return compile_candidate(task.model_copy(update=changes))


def run(of: Subject, path: Path, made: Compiled | None, rows: int) -> np.ndarray:
    random = np.random.default_rng(rows)
    inputs = {
        "x": random.standard_normal((rows, 64)).astype(np.float32),
        "scale": random.standard_normal((rows, 1)).astype(np.float32),
    }
    options = made.options if made is not None else {}
    instance = get_backend("torch").load(path, of.signature, "cpu", 1, None, options)
    try:
        return np.array(instance.run(inputs)[0])
    finally:
        instance.close()


def test_a_compiled_program_answers_as_pytorch_does(tmp_path: Path) -> None:
    of, folder = subject(tmp_path), tmp_path / "out"
    outcome = compile_it(of, folder)
    made = outcome.compiled
    assert made is not None, f"{outcome.error}\n{outcome.stderr}"
    assert [path.name for path in folder.iterdir()] == [*made.files]
    for rows in (1, 3, 17):
        found = run(of, folder / made.files[0], made, rows)
        np.testing.assert_allclose(found, run(of, of.path, None, rows), rtol=1e-4, atol=1e-5)
    with pytest.raises(Failure, match="PyTorch"):  # machine code is loaded only where the compilation said so
        get_backend("torch").load(folder / made.files[0], of.signature, "cpu", 1)


def test_a_program_that_could_execute_is_refused(tmp_path: Path) -> None:
    of = subject(tmp_path)
    of.path.write_bytes(b"PK\x03\x04 no program")
    outcome = compile_it(of, tmp_path / "out")
    assert outcome.compiled is None
    assert outcome.error
    assert list((tmp_path / "out").iterdir()) == []


def test_a_compilation_in_time_for_nothing_leaves_nothing(tmp_path: Path) -> None:
    outcome = compile_it(subject(tmp_path), tmp_path / "out", seconds_max=1.5)
    assert outcome.error == "it took longer than 1.5 s"
    assert list((tmp_path / "out").iterdir()) == []
