"""What only the IREE backend has, and the targets "iree" and "xla" for functions of JAX."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from millstream.plugins.compile.candidate import Compiled, CompileOutcome, CompileTask, Subject
from millstream.plugins.compile.form_runner import compile_candidate
from millstream.plugins.compile.targets import get_target
from millstream.services.errors import Code, Failure
from millstream.services.model.signature import Signature
from millstream.workers.backends import get_backend
from millstream.workers.backends.base import Array
from tests.contract.backend_cases import signature
from tests.kit import jax_models

pytestmark = pytest.mark.frameworks

MLP = signature([("x", "FP32", (-1, 8))], [("output_0", "FP32", (-1, 4))])
CNN = signature([("x", "FP32", (-1, 16, 16, 3))], [("output_0", "FP32", (-1, 5))])


def compiled(folder: Path, target: str, path: Path, of: Signature, flags: dict[str, object]) -> CompileOutcome:
    subject = Subject(path=path, source_format="jax-export", signature=of)
    (candidate,) = [one for one in get_target(target).candidates(subject) if one.flags == flags]
    folder.mkdir()
    task = CompileTask(subject=subject, candidate=candidate, folder=folder, seconds_max=550, low_priority=False)
    return compile_candidate(task)


def run(folder: Path, path: Path, of: Signature, made: Compiled, x: Array) -> Array:
    file = folder / made.files[0] if made.files else path
    return get_backend(made.backend).load(file, of, "cpu", 1, None, made.options).run({"x": x})[0]


@pytest.mark.parametrize(
    ("target", "flags"),
    [
        ("iree", {"opt_level": "O2", "data_tiling": False}),
        ("iree", {"opt_level": "O3", "data_tiling": True}),
        ("xla", {"padding": False}),
        ("xla", {"fast_math": True}),
    ],
)
def test_compiled_functions_answer_as_jax_does(tmp_path: Path, target: str, flags: dict[str, object]) -> None:
    from jax import export

    mlp, cnn = jax_models.mlp(tmp_path / "mlp.jax"), jax_models.cnn(tmp_path / "cnn.jax")
    for name, path, of, width in (("m", mlp, MLP, (8,)), ("c", cnn, CNN, (16, 16, 3))):
        outcome = compiled(tmp_path / name, target, path, of, flags)
        assert outcome.compiled is not None, outcome.error + outcome.stderr
        for rows in (1, 3, 40):
            x = np.random.default_rng(rows).standard_normal((rows, *width)).astype(np.float32)
            wanted = np.asarray(export.deserialize(bytearray(path.read_bytes())).call(x))
            found = run(tmp_path / name, path, of, outcome.compiled, x)
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_function_that_iree_compiles_for_fixed_rows_alone_is_filled_up(tmp_path: Path) -> None:
    path = jax_models.mlp(tmp_path / "mlp.jax")
    outcome = compiled(tmp_path / "out", "iree", path, MLP, {"opt_level": "O2", "data_tiling": False})
    assert outcome.compiled is not None
    assert "rows-8.vmfb" in outcome.compiled.files
    assert "fixed numbers of rows" in outcome.compiled.notes[0]
    empty = run(tmp_path / "out", path, MLP, outcome.compiled, np.zeros((0, 8), np.float32))
    assert empty.shape == (0, 4)


def test_an_input_that_is_not_used_and_outputs_in_another_order(tmp_path: Path) -> None:
    path = jax_models.save(tmp_path / "m.jax", lambda a, b, c: {"z": a + 1, "y": c * 2}, *[("float32", ("b", 2))] * 3)
    specs = [("FP32", (-1, 2))] * 5
    names = ("a", "b", "c", "y", "z")
    rows = [(name, *spec) for name, spec in zip(names, specs, strict=True)]
    instance = get_backend("iree").load(path, signature(rows[:3], rows[3:]), "cpu", 1)
    given = {name: np.full((3, 2), number, np.float32) for number, name in enumerate("abc")}
    found = instance.run(given)
    assert [one[0, 0] for one in found] == [4, 1]


def test_what_iree_cannot_compile_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    import jax.numpy as jnp

    path = jax_models.save(tmp_path / "m.jax", jnp.linalg.cholesky, ("float32", (3, 3)))
    of = signature([("a", "FP32", (3, 3))], [("output_0", "FP32", (3, 3))], batching=False)
    outcome = compiled(tmp_path / "out", "iree", path, of, {"opt_level": "O2", "data_tiling": False})
    assert outcome.compiled is None
    assert "IREE cannot compile the model" in outcome.error
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(Failure, match="IREE cannot compile the model") as caught:
        get_backend("iree").load(path, of, "cpu", 1)
    assert caught.value.code is Code.MODEL
    assert get_backend("jax").load(path, of, "cpu", 1).run({"a": np.eye(3, dtype=np.float32)})[0].shape == (3, 3)
