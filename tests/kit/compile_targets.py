"""A version with samples, and what every compile target must do with it.

tests/contract runs this for targets that the ordinary environment has, tests/frameworks for the others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from millstream.plugins.compile.candidate import Candidate, Compiled, CompileOutcome, CompileTask, Subject
from millstream.plugins.compile.form_runner import compile_candidate
from millstream.plugins.compile.targets.base import Target
from millstream.services.model.signature import Signature, TensorSpec
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Array

SIGNATURE = Signature(
    inputs=(TensorSpec(name="image", datatype="FP32", shape=(-1, 3, 8, 8)),),
    outputs=(TensorSpec(name="scores", datatype="FP32", shape=(-1, 10)),),
    batching=True,
)
SAMPLES = 24
SECONDS_MAX = 240.0
COSINE_MIN = 0.99  # of a lossy target's outputs


def cnn(path: Path) -> Path:
    """Write a model: Conv 3->8, Relu, Conv 8->8, Relu, mean, Gemm; a proof shows that its rows are independent."""
    random = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> onnx.TensorProto:
        scale = (2 / max(1, int(np.prod(shape[1:])))) ** 0.5
        return numpy_helper.from_array((random.standard_normal(shape) * scale).astype(np.float32), name)

    nodes = [
        helper.make_node("Conv", ["image", "w0", "b0"], ["c0"], name="conv0", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c0"], ["r0"], name="relu0"),
        helper.make_node("Conv", ["r0", "w1", "b1"], ["c1"], name="conv1", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["c1"], ["r1"], name="relu1"),
        helper.make_node("GlobalAveragePool", ["r1"], ["mean"], name="mean"),
        helper.make_node("Flatten", ["mean"], ["flat"], name="flat"),
        helper.make_node("Gemm", ["flat", "w2", "b2"], ["scores"], name="gemm", transB=1),
    ]
    weights = [weight("w0", 8, 3, 3, 3), weight("w1", 8, 8, 3, 3), weight("w2", 10, 8)]
    weights += [weight("b0", 8), weight("b1", 8), weight("b2", 10)]
    graph = helper.make_graph(
        nodes,
        "cnn",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["N", 3, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["N", 10])],
        weights,
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def images(rows: int, seed: int = 1) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, 3, 8, 8)).astype(np.float32)


def samples(path: Path) -> Path:
    arrays: dict[str, Any] = {"input/image": images(SAMPLES)}
    np.savez(path, **arrays)
    return path


def subject(folder: Path, device: str = "cpu") -> Subject:
    return Subject(path=cnn(folder / "cnn.onnx"), source_format="onnx", signature=SIGNATURE, threads=1, device=device)


def task(of: Subject, candidate: Candidate, folder: Path, given: Path) -> CompileTask:
    folder.mkdir()
    return CompileTask(
        subject=of,
        candidate=candidate,
        folder=folder,
        samples=given,
        seconds_max=SECONDS_MAX,
        low_priority=False,  # beside other tests a compilation of 2 s would take minutes
    )


def compiled(done: CompileOutcome) -> Compiled:
    assert done.compiled is not None, f"{done.error}\n{done.stderr}"
    return done.compiled


def run(of: Subject, made: Compiled | None, folder: Path, inputs: Array) -> Array:
    """Return the outputs of the compiled form, or of the version itself."""
    backend = get_backend(made.backend if made is not None else "onnxruntime")
    path = folder / made.files[0] if made is not None and made.files else of.path
    options = made.options if made is not None else {}
    instance = backend.load(path, of.signature, of.device, of.threads, None, options)
    try:
        return np.concatenate([np.array(instance.run({"image": row[None]})[0]) for row in inputs])
    finally:
        instance.close()


def check_outputs(target: Target, expected: Array, found: Array) -> None:
    """Fail if outputs differ beyond the target's class: rounding of floating-point numbers, or lossy."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    if not target.lossy:
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    norm = float(np.linalg.norm(expected) * np.linalg.norm(found))
    assert float(expected.ravel() @ found.ravel()) / norm >= COSINE_MIN


def check_compiles(target: Target, folder: Path) -> None:
    """Compile all candidates twice; compare outputs and bytes, and what was written."""
    of, given = subject(folder), samples(folder / "samples.npz")
    expected = run(of, None, folder, images(5, seed=2))
    candidates = target.candidates(of)
    assert candidates
    for number, candidate in enumerate(candidates):
        before = {path.name for path in folder.iterdir()}
        one, other = folder / f"{number}-one", folder / f"{number}-other"
        made = compiled(compile_candidate(task(of, candidate, one, given)))
        assert made.backend == target.backend
        assert sorted(path.name for path in one.iterdir()) == sorted(made.files)
        assert {path.name for path in folder.iterdir()} == before | {one.name}
        check_outputs(target, expected, run(of, made, one, images(5, seed=2)))
        if target.deterministic and made.files:
            compiled(compile_candidate(task(of, candidate, other, given)))
            assert [(one / name).read_bytes() == (other / name).read_bytes() for name in made.files]


def check_fails(target: Target, folder: Path, **changes: object) -> str:
    """Compile the first candidate with changes of the task; return the error. Nothing may be left."""
    of, given = subject(folder), samples(folder / "samples.npz")
    before = task(of, target.candidates(of)[0], folder / "out", given)
    done = compile_candidate(before.model_copy(update=changes))
    assert done.compiled is None
    assert done.error
    assert list((folder / "out").iterdir()) == []
    return done.error
