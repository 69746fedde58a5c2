"""A worker compiles a large version while it serves, and loads the compiled form when it starts again."""

from __future__ import annotations

import os
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest

from tests.kit import models, v2
from tests.kit.command_line import Millstream
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

SIZE = 72 << 20
GIVEN = {"x": np.array([[1.0], [2.0]], np.float32)}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with running_stack(folder) as stack:
        stack.push("weighty", models.weighty(folder / "weighty.onnx", SIZE))
        yield stack


def compiled(stack: Stack, name: str = "weighty") -> Path:
    return stack.home / "repository" / "models" / name / "1" / "compiled"


def variant(stack: Stack, name: str = "weighty") -> Path | None:
    return next(compiled(stack, name).glob("onnxruntime-cpu-*/*.onnx"), None)


def answer(stack: Stack, name: str = "weighty") -> np.ndarray:
    body, headers = v2.request(GIVEN, parameters=v2.PATIENT)
    reply = stack.http.post(f"/v2/models/{name}/infer", content=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return v2.outputs(reply.content, dict(reply.headers))["y"]


def start_again(stack: Stack, name: str = "weighty") -> str:
    """Kill the worker; return what its successor logs until the version is ready again."""
    log = stack.home / "logs" / "cpu-0.log"
    before = len(log.read_text())
    os.kill(wait_until(lambda: stack.pids().get("cpu-0")), signal.SIGKILL)
    wait_until(lambda: f"ready: {name}" in log.read_text()[before:])
    return log.read_text()[before:]


def test_a_version_is_compiled_while_it_serves_and_loaded_from_there(stack: Stack) -> None:
    before = answer(stack)
    wait_until(lambda: variant(stack))
    assert "is loaded from its variant onnxruntime-cpu-" in start_again(stack)
    np.testing.assert_array_equal(answer(stack), before)


def test_variants_are_shown(stack: Stack) -> None:
    [shown] = wait_until(lambda: stack.http.get("/admin/v1/models/weighty/versions/1").json()["variants"])
    assert shown["target"] == "onnxruntime-cpu"
    assert shown["runtime"].startswith("onnxruntime ")
    assert shown["size_bytes"] > 0
    assert shown["refused"] is None
    assert "onnxruntime-cpu by onnxruntime" in " ".join(Millstream(stack.home).ok("describe", "weighty").split())


def test_a_damaged_variant_is_not_loaded_and_made_again(stack: Stack) -> None:
    before = answer(stack)
    path = wait_until(lambda: variant(stack))
    content = path.read_bytes()
    path.write_bytes(content[:1000] + b"\0" + content[1001:])
    said = start_again(stack)
    assert "is deleted: optimised.variant.onnx is damaged" in said
    assert "is loaded from its variant" not in said
    np.testing.assert_array_equal(answer(stack), before)
    again = wait_until(lambda: variant(stack))
    wait_until(lambda: again.stat().st_size == len(content), what="all of it is there")


def test_a_version_whose_weights_are_in_a_file_of_their_own_is_compiled_too(stack: Stack, tmp_path: Path) -> None:
    model = onnx.load(models.weighty(tmp_path / "inline.onnx", SIZE))
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="model.onnx.data")
    with zipfile.ZipFile(tmp_path / "both.zip", "w") as archive:
        for name in ("model.onnx", "model.onnx.data"):
            archive.write(tmp_path / name, name)
    stack.push("apart", tmp_path / "both.zip")
    before = answer(stack, "apart")
    wait_until(lambda: variant(stack, "apart"))
    said = start_again(stack, "apart").splitlines()
    assert any("apart:1:" in line and "is loaded from its variant" in line for line in said)
    np.testing.assert_array_equal(answer(stack, "apart"), before)
    assert "is not compiled" not in (stack.home / "logs" / "cpu-0.log").read_text()
    assert stack.http.delete("/admin/v1/models/apart").status_code in {200, 204}


def test_variants_are_deleted_with_their_version(stack: Stack) -> None:
    assert stack.http.delete("/admin/v1/models/weighty").status_code in {200, 204}
    wait_until(lambda: not compiled(stack).exists())
