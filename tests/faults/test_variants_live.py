"""A worker compiles a large version while it serves, and loads the compiled form when it starts again."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
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


def compiled(stack: Stack) -> Path:
    return stack.home / "repository" / "models" / "weighty" / "1" / "compiled"


def variant(stack: Stack) -> Path | None:
    return next(compiled(stack).glob("onnxruntime-cpu-*/*.onnx"), None)


def answer(stack: Stack) -> np.ndarray:
    body, headers = v2.request(GIVEN, parameters=v2.PATIENT)
    reply = stack.http.post("/v2/models/weighty/infer", content=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return v2.outputs(reply.content, dict(reply.headers))["y"]


def start_again(stack: Stack) -> str:
    """Kill the worker; return what its successor logs until the version is ready again."""
    log = stack.home / "logs" / "cpu-0.log"
    before = len(log.read_text())
    os.kill(wait_until(lambda: stack.pids().get("cpu-0")), signal.SIGKILL)
    wait_until(lambda: "ready: weighty" in log.read_text()[before:])
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


def test_variants_are_deleted_with_their_version(stack: Stack) -> None:
    assert stack.http.delete("/admin/v1/models/weighty").status_code in {200, 204}
    wait_until(lambda: not compiled(stack).exists())
