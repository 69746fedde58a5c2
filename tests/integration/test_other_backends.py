"""Versions that workers of other backends serve, through a gateway, beside those of ONNX Runtime."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from millstream.services.model.manifest import ModelConfig
from millstream.services.model.signature import Signature
from millstream.services.repository.folder import FolderRepository
from millstream.services.settings import Settings
from millstream.services.wire.records import WorkerRecord
from tests.contract.backend_cases import signature
from tests.kit import models, torch_library, torch_models, v2
from tests.kit.stack import Stack, running_stack
from tests.kit.versions import publish_content
from tests.kit.wait import wait_until
from tests.kit.worker_process import running_worker

MLP = signature([("input", "FP32", (-1, 64))], [("output", "FP32", (-1, 10))])
PAIR = signature(
    [("a", "FP32", (-1, 4)), ("b", "FP32", (-1, 4))], [("sum", "FP32", (-1, 4)), ("diff", "FP32", (-1, 4))]
)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("stack")
    with running_stack(folder) as stack, ExitStack() as workers:
        stack.push("mlp", models.mlp(folder / "mlp.onnx"))
        workers.enter_context(running_worker(stack, "openvino", "openvino"))
        if torch_library.available():
            environment = torch_library.environment()
            workers.enter_context(running_worker(stack, "torch", "torch", environment=environment))
        yield stack


def publish(stack: Stack, name: str, content: bytes, source_format: str, of: Signature, pool: str) -> None:
    repository = FolderRepository(Settings(home=stack.home).repository_dir)
    publish_content(repository, name, content, source_format, of, ModelConfig(pools=(pool,)))


def infer(stack: Stack, model: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    wait_until(lambda: stack.http.get(f"/v2/models/{model}/ready").status_code == 200)
    body, headers = v2.request(inputs)
    reply = stack.http.post(f"/v2/models/{model}/infer", content=body, headers=headers)
    assert reply.status_code == 200, reply.text
    return v2.outputs(reply.content, dict(reply.headers))


def failure(stack: Stack, model: str) -> str:
    """Wait until a worker has refused the version; return its reason."""

    def reason() -> str:
        document = stack.http.get(f"/admin/v1/models/{model}/versions/1").json()
        return next((one.get("reason") for one in document.get("instances", []) if one["state"] == "failed"), "")

    return wait_until(reason)


def test_openvino_serves_what_onnx_runtime_serves(stack: Stack, tmp_path: Path) -> None:
    publish(stack, "ov-mlp", models.mlp(tmp_path / "mlp.onnx").read_bytes(), "onnx", MLP, "openvino")
    given = {"input": np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32)}
    found = infer(stack, "ov-mlp", given)["output"]
    np.testing.assert_allclose(found, infer(stack, "mlp", given)["output"], atol=1e-5)


def test_openvino_says_what_it_does_not_serve(stack: Stack, tmp_path: Path) -> None:
    text = signature([("x", "BYTES", (-1, 2))], [("y", "BYTES", (-1, 2))])
    content = models.identity(tmp_path / "text.onnx", "BYTES").read_bytes()
    publish(stack, "ov-text", content, "onnx", text, "openvino")
    assert "does not compute BYTES" in failure(stack, "ov-text")


def test_a_backend_refuses_a_format_that_it_does_not_load(stack: Stack) -> None:
    publish(stack, "remote-on-ov", json.dumps({}).encode(), "triton", MLP, "openvino")
    assert "the backend openvino loads onnx and openvino, and this version is triton" in failure(stack, "remote-on-ov")


@pytest.mark.needs("torch")
def test_torch_serves_an_exported_program(stack: Stack, tmp_path: Path) -> None:
    content = torch_models.sum_and_difference(tmp_path / "model.pt2").read_bytes()
    publish(stack, "pair", content, "torch-export", PAIR, "torch")
    a, b = np.full((3, 4), 5, np.float32), np.full((3, 4), 2, np.float32)
    found = infer(stack, "pair", {"b": b, "a": a})
    assert found["sum"].tolist() == [[7] * 4] * 3
    assert found["diff"].tolist() == [[3] * 4] * 3


def test_workers_publish_what_they_load(stack: Stack) -> None:
    def published() -> set[tuple[str, str, tuple[str, ...]]]:
        """What there is: a record expires if its worker is held up."""
        texts = [stack.redis.get(key) for key in stack.redis.scan_iter("ms:*record:*")]
        records = [WorkerRecord.model_validate_json(text) for text in texts if text]
        return {(one.pool, one.backend, tuple(one.formats)) for one in records if one.pool in {"cpu", "openvino"}}

    expected = {("cpu", "onnxruntime", ("onnx",)), ("openvino", "openvino", ("onnx", "openvino"))}
    wait_until(lambda: published() == expected, what="both say what they load")
