"""Functions that jax.export serialized: pushed, checked in the sandbox, served by workers of the jax backend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream.plugins.engines.jax.document import is_export_file, read_header
from millstream.plugins.engines.jax.jax_program import JaxProgram, load_library
from millstream.services.errors import Failure
from tests.kit import jax_models, v2
from tests.kit.command_line import Millstream
from tests.kit.stack import Stack, running_stack

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("exports"), pools="jax=1,backend=jax") as stack:
        yield stack


def upload(stack: Stack, name: str, content: bytes, config: Any = None) -> tuple[int, dict[str, Any]]:
    query = {"wait": "300"} | ({"config": json.dumps(config)} if config else {})
    reply = stack.http.post(f"/admin/v1/models/{name}/versions", params=query, content=content)
    return reply.status_code, reply.json()


def infer(stack: Stack, model: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    body, headers = v2.request(inputs)
    reply = stack.http.post(f"/v2/models/{model}/infer", content=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return v2.outputs(reply.content, dict(reply.headers))


def test_a_pushed_mlp_with_variable_rows_is_served(stack: Stack, tmp_path: Path) -> None:
    path = jax_models.mlp(tmp_path / "any-name")
    assert "ready" in Millstream(stack.home).ok("push", "mlp", path, "--config", '{"batching": true}')
    version = stack.http.get("/admin/v1/models/mlp/versions/1").json()
    [only] = version["inputs"]
    assert (only["name"], only["datatype"], only["shape"]) == ("x", "FP32", [-1, 8])
    assert version["batching_decided"] == "requested"
    for rows in (1, 3, 8):
        x = np.random.default_rng(rows).standard_normal((rows, 8)).astype(np.float32)
        np.testing.assert_allclose(infer(stack, "mlp", {"x": x})["output_0"], jax_models.mlp_answers(x), rtol=1e-5)


def test_a_cnn_answers_as_jax_does(stack: Stack, tmp_path: Path) -> None:
    from jax import export

    path = jax_models.cnn(tmp_path / "cnn.jax")
    status, version = upload(stack, "cnn", path.read_bytes())
    assert (status, version["batching"], version["batching_decided"]) == (201, False, "off")
    assert "not analysed" in version["batching_reason"]
    x = np.random.default_rng(0).standard_normal((2, 16, 16, 3)).astype(np.float32)
    wanted = np.asarray(export.deserialize(bytearray(path.read_bytes())).call(x))
    np.testing.assert_allclose(infer(stack, "cnn", {"x": x})["output_0"], wanted, rtol=1e-5, atol=1e-6)


def test_rows_that_influence_each_other_are_found(stack: Stack, tmp_path: Path) -> None:
    path = jax_models.save(tmp_path / "mean.jax", lambda x: x - x.mean(0), ("float32", ("b", 4)))
    status, said = upload(stack, "mean", path.read_bytes(), {"batching": True})
    assert status == 400
    assert "depends on the other rows" in said["error"]


def test_a_fixed_batch_is_served_with_its_rows(stack: Stack, tmp_path: Path) -> None:
    status, version = upload(stack, "fixed", jax_models.mlp(tmp_path / "m.jax", rows=4).read_bytes())
    assert (status, version["inputs"][0]["shape"]) == (201, [4, 8])
    x = np.ones((4, 8), np.float32)
    np.testing.assert_allclose(infer(stack, "fixed", {"x": x})["output_0"], jax_models.mlp_answers(x), rtol=1e-5)


def test_nested_arguments_and_results_have_the_names_of_their_keys(tmp_path: Path) -> None:
    import jax
    from jax import export

    def function(params: Any, batch: Any, *, scale: Any) -> Any:
        return {"scores": batch["x"] @ params["w"] * scale, "pair": (batch["y"], batch["y"] + 1)}

    spec = jax.ShapeDtypeStruct
    exported = export.export(jax.jit(function))(
        {"w": spec((8, 4), "float32")},
        {"x": spec((2, 8), "float32"), "y": spec((2,), "int32")},
        scale=spec((), "float32"),
    )
    path = tmp_path / "nested.jax"
    path.write_bytes(exported.serialize())
    program = JaxProgram(load_library(1), path)
    assert [tensor.name for tensor in program.inputs] == ["params.w", "batch.x", "batch.y", "scale"]
    assert [tensor.name for tensor in program.outputs] == ["pair.0", "pair.1", "scores"]


def test_a_single_dictionary_of_tensors_needs_no_prefix(tmp_path: Path) -> None:
    import jax
    from jax import export

    specs = {name: jax.ShapeDtypeStruct((2, 3), "int32") for name in ("ids", "mask")}
    path = tmp_path / "one.jax"
    path.write_bytes(export.export(jax.jit(lambda batch: batch["ids"] * batch["mask"]))(specs).serialize())
    assert [tensor.name for tensor in JaxProgram(load_library(1), path).inputs] == ["ids", "mask"]


def test_exports_that_cannot_run_are_refused_and_leave_nothing(stack: Stack, tmp_path: Path) -> None:
    good = jax_models.mlp(tmp_path / "m.jax").read_bytes()
    cuda = jax_models.mlp(tmp_path / "cuda.jax", rows=2, platforms=["cuda"]).read_bytes()
    newer = bytearray(good)  # of a later version of MLIR's bytecode, whose number follows the magic number
    newer[newer.index(b"ML\xefR") + 4] = 0xFF
    refused = {
        "only: export it with": cuda,
        "cut short": good[: len(good) // 2],
        "cannot read the StableHLO": bytes(newer),
        "which v2 cannot carry": jax_models.save(
            tmp_path / "c.jax", lambda x: x.astype("complex64"), ("float32", (2,))
        ).read_bytes(),
        "has no outputs": jax_models.save(tmp_path / "n.jax", lambda x: (), ("float32", (2,))).read_bytes(),
    }
    for reason, content in refused.items():
        status, said = upload(stack, "bad", content)
        assert status == 400, (reason, said)
        assert reason in said["error"]
        assert "\n" not in said["error"]
    assert stack.http.get("/admin/v1/models/bad").status_code == 404
    assert not list((stack.home / "repository").glob("staging/*"))


def test_calls_to_code_of_the_process_are_refused(tmp_path: Path) -> None:
    """JAX refuses to serialize callbacks; a file that names one all the same is refused before it is compiled."""
    good = jax_models.save(tmp_path / "m.jax", lambda x: x + 1, ("float32", ("b", 4))).read_bytes()
    path = tmp_path / "callback.jax"
    path.write_bytes(good.replace(b"shape_assertion", b"xla_ffi_python_"[:15]))
    with pytest.raises(Failure, match="not on the list of harmless custom calls"):
        JaxProgram(load_library(1), path)


def test_functions_of_linear_algebra_run(tmp_path: Path) -> None:
    import jax.numpy as jnp

    path = jax_models.save(tmp_path / "m.jax", jnp.linalg.cholesky, ("float32", (3, 3)))
    x = np.array([[4, 2, 0], [2, 5, 1], [0, 1, 6]], np.float32)
    (found,) = JaxProgram(load_library(1), path).run([x])
    np.testing.assert_allclose(found, np.linalg.cholesky(x), rtol=1e-5)


def test_every_cut_of_an_export_is_refused(tmp_path: Path) -> None:
    content = jax_models.mlp(tmp_path / "m.jax").read_bytes()
    path = tmp_path / "cut.jax"
    for size in range(0, len(content.rstrip(b"\0")), 7):  # the zeros fill up the last text
        path.write_bytes(content[:size])
        with pytest.raises(Failure):
            read_header(path)
    path.write_bytes(content)
    assert is_export_file(path)
