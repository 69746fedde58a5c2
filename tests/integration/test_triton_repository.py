"""A Triton model repository served in place, and models loaded and unloaded by clients: through a real server."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from tests.kit import models
from tests.kit.stack import Stack, running_stack
from tests.kit.wait import wait_until

LABELS = "cat\ndog\n"


def times(path: Path, factor: float, *, outside: bool = False) -> Path:
    """ "x" FP32 [N, 2] -> "y" = factor * x; `outside`: the factor is in a file beside it."""
    value = onnx.numpy_helper.from_array(np.full(2, factor, np.float32), "factor")
    shape = ["N", 2]
    tensor = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Mul", ["x", "factor"], ["y"])],
        "graph",
        [tensor("x", onnx.TensorProto.FLOAT, shape)],
        [tensor("y", onnx.TensorProto.FLOAT, shape)],
        [value],
    )
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    if outside:
        onnx.save_model(made, str(path), save_as_external_data=True, location="factor.bin", size_threshold=0)
    else:
        path.write_bytes(made.SerializeToString())
    return path


def lay_out(folder: Path) -> Path:
    """Models: scale (versions 1 to 3 and folders that are none), plain (no configuration), alone, broken, worse."""
    for version in (1, 2, 3):
        times(folder / "scale" / str(version) / "model.onnx", version, outside=version == 2)
    for ignored in ("0", "old", ".git"):
        times(folder / "scale" / ignored / "model.onnx", 99)
    (folder / "scale" / "labels.txt").write_text(LABELS)
    (folder / "scale" / "warmup").mkdir()
    (folder / "scale" / "warmup" / "raw").write_bytes(np.ones(2, np.float32).tobytes())
    (folder / "scale" / "config.pbtxt").write_text(
        """
        name: "scale"
        platform: "onnxruntime_onnx"
        max_batch_size: 8
        input [ { name: "x" data_type: TYPE_FP32 dims: [ 2 ] } ]
        output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" } ]
        version_policy { specific { versions: [ 2, 3 ] } }
        dynamic_batching { max_queue_delay_microseconds: 100 }
        model_warmup [ { name: "one" batch_size: 1
          inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 2 ] input_data_file: "raw" } } } ]
        parameters { key: "mine" value { string_value: "own" } }
        """
    )
    for version in (4, 5):
        times(folder / "plain" / str(version) / "model.onnx", version)
    (folder / "alone" / "1").mkdir(parents=True)
    models.transpose(folder / "alone" / "1" / "model.onnx")
    (folder / "broken" / "1").mkdir(parents=True)
    (folder / "broken" / "1" / "model.onnx").write_bytes(b"this is no model")
    times(folder / "worse" / "1" / "model.onnx", 1)
    (folder / "worse" / "config.pbtxt").write_text("sequence_batching { }")
    return folder


def content(folder: Path) -> dict[str, tuple[str, float, int]]:
    """Every file below `folder`: its digest, when it was changed, and how many names it has."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime,
            path.stat().st_nlink,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_out(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def stack(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    settings = {"repository": repository}
    with running_stack(tmp_path_factory.mktemp("stack"), gateways=2, pools="cpu=2", settings=settings) as stack:
        yield stack


@pytest.fixture
def client(stack: Stack) -> Iterator[Any]:
    with triton.InferenceServerClient(stack.url.removeprefix("http://")) as client:
        yield client


def scaled(client: Any, model: str, version: str = "") -> float:
    """What the model multiplies by."""
    given = triton.InferInput("x", [1, 2], "FP32")
    given.set_data_from_numpy(np.ones((1, 2), np.float32))
    return float(client.infer(model, [given], model_version=version).as_numpy("y")[0, 0])


def index(client: Any) -> dict[tuple[str, str], tuple[str, str]]:
    """(model, version) -> (state, reason)."""
    found = client.get_model_repository_index()
    return {(one["name"], one.get("version", "")): (one.get("state", ""), one.get("reason", "")) for one in found}


def refusal(call: Any, *arguments: Any, **named: Any) -> str:
    with pytest.raises(InferenceServerException) as caught:
        call(*arguments, **named)
    return str(caught.value)


def everywhere(stack: Stack, path: str, status: int) -> None:
    """Wait until every gateway answers `path` with `status`."""
    for number in range(stack.gateways):
        with stack.gateway(number) as gateway:
            wait_until(lambda: gateway.get(path).status_code == status, what=f"{path} is {status}")


def test_a_repository_in_place(stack: Stack, client: Any, repository: Path) -> None:
    before = content(repository)
    found = index(client)
    assert found["scale", "2"] == found["scale", "3"] == found["plain", "5"] == found["alone", "1"] == ("READY", "")
    assert ("scale", "1") not in found
    assert ("plain", "4") not in found
    state, reason = found["broken", ""]
    assert state == "UNAVAILABLE"
    assert "failed to load 'broken', version 1: this is not an ONNX model" in reason
    assert "sequence_batching is not supported" in found["worse", ""][1]
    assert "broken is not served" in "\n".join(stack.lines)
    assert "scale version 2, 3, in place in" in "\n".join(stack.lines)

    assert (scaled(client, "scale"), scaled(client, "scale", "2"), scaled(client, "plain")) == (3, 2, 5)
    for version in ("1", "0", "4"):
        assert "not found" in refusal(scaled, client, "scale", version)
    metadata = client.get_model_metadata("scale")
    assert metadata["versions"] == ["2", "3"]
    assert client.get_model_metadata("alone")["inputs"][0]["shape"] == [3, 4]

    home = stack.home / "repository"
    assert [path for path in home.rglob("*") if path.suffix in {".onnx", ".bin"}] == []
    assert content(repository) == before
    manifest = json.loads((home / "models" / "scale" / "2" / "manifest.json").read_text())
    assert {file["path"] for file in manifest["files"]} == {
        "2/model.onnx",
        "2/factor.bin",
        "labels.txt",
        "warmup/raw",
    }
    assert manifest["config"]["labels"] == {"y": "labels.txt"}
    assert manifest["config"]["warmup"][0]["inputs"]["x"]["file"] == "warmup/raw"
    assert stack.http.get("/admin/v1/models/scale").json()["source"] == str(repository)
