"""Programs of torch.export and TorchScript, written by PyTorch: pushed, served as ONNX, and called over REST."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from millstream.client.client import Client
from millstream.services.errors import Failure
from tests.kit.command_line import Millstream
from tests.kit.stack import Stack, running_stack

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

DYNAMIC = torch.export.Dim.DYNAMIC


class Cnn(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Conv2d(3, 8, 3, padding=1),
            torch.nn.BatchNorm2d(8),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.AdaptiveAvgPool2d(1),
            torch.nn.Flatten(),
            torch.nn.Linear(8, 10),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.layers(image)


class Transformer(torch.nn.Module):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(100, 32)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(32, 5)

    def forward(self, ids: Any) -> Any:
        return {"logits": self.head(self.encoder(self.embedding(ids)).mean(1))}


class SingularValues(torch.nn.Module):  # type: ignore[misc]
    """Has an operator that ONNX lacks."""

    def forward(self, x: Any) -> Any:
        return torch.linalg.svdvals(x)


def program(path: Path, module: Any, example: Any, shapes: dict[int, Any]) -> Path:
    torch.export.save(torch.export.export(module, (example,), dynamic_shapes=(shapes,)), path)
    return path


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    torch.manual_seed(1)
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, key=stack.key) as client:
        yield client


def refusal(client: Client, path: Path, **options: Any) -> str:
    with pytest.raises(Failure) as error:
        client.push("refused", path, **options)
    return str(error.value)


def test_a_cnn_is_served_as_onnx_and_shares_runs(stack: Stack, client: Client, tmp_path: Path) -> None:
    model = Cnn().eval()
    path = program(tmp_path / "cnn.pt2", model, torch.randn(2, 3, 32, 32), {0: DYNAMIC})
    assert "ready" in Millstream(stack.home).ok("push", "cnn", path)
    version = client.version("cnn", 1)
    assert version["batching_decided"] == "proven"
    assert version["imported"] is not None
    assert version["imported"]["importer"] == "PyTorch"
    kept = {file.name for file in (stack.home / "repository" / "models" / "cnn" / "1").rglob("*")}
    assert {"model", "model.onnx", "samples.npz"} <= kept
    images = np.random.default_rng(1).standard_normal((5, 3, 32, 32), np.float32)
    with torch.inference_mode():
        expected = model(torch.from_numpy(images)).numpy()
    assert np.allclose(client.predict("cnn", {"image": images})["output_0"], expected, rtol=1e-3, atol=1e-5)


def test_a_transformer_takes_sequences_of_any_length(client: Client, tmp_path: Path) -> None:
    model = Transformer().eval()
    path = program(tmp_path / "t.pt2", model, torch.randint(0, 100, (2, 7)), {0: DYNAMIC, 1: DYNAMIC})
    version = client.push("transformer", path, wait_s=300)
    assert version["batching_decided"] == "proven"
    for rows, tokens in ((1, 1), (3, 12), (2, 40)):
        ids = np.random.default_rng(tokens).integers(0, 100, (rows, tokens))
        with torch.inference_mode():
            expected = model(torch.from_numpy(ids))["logits"].numpy()
        assert np.allclose(client.predict("transformer", {"ids": ids})["logits"], expected, rtol=1e-3, atol=1e-5)


def test_what_onnx_lacks_is_refused_where_no_pool_has_pytorch(client: Client, tmp_path: Path) -> None:
    path = program(tmp_path / "m.pt2", SingularValues(), torch.randn(2, 3, 3), {0: DYNAMIC})
    said = refusal(client, path)
    assert "aten._linalg_svd" in said
    assert "--pool torch=1,backend=torch" in said


def test_what_onnx_lacks_is_served_by_pytorch(tmp_path: Path) -> None:
    model = SingularValues().eval()
    path = program(tmp_path / "m.pt2", model, torch.randn(2, 3, 3), {0: DYNAMIC})
    with (
        running_stack(tmp_path / "stack", pools="cpu=1,torch=1,backend=torch") as stack,
        Client(stack.url, key=stack.key) as client,
    ):
        version = client.push("values", path, wait_s=300)
        assert any("aten._linalg_svd" in note for note in version["notes"])
        x = np.random.default_rng(1).standard_normal((1, 3, 3)).astype(np.float32)
        expected = model(torch.from_numpy(x)).numpy()
        assert np.allclose(client.predict("values", {"x": x})["output_0"], expected, rtol=1e-3, atol=1e-5)
        # A pool that the configuration names decides the form
        path = program(tmp_path / "cnn.pt2", Cnn().eval(), torch.randn(2, 3, 32, 32), {0: DYNAMIC})
        named = client.push("cnn", path, config={"pools": ["torch"]}, wait_s=300)
        assert (named["state"], named["notes"][:1]) == ("ready", named["notes"][:1])


@pytest.mark.parametrize("form", ["traced", "scripted"])
def test_torchscript_is_served_with_declared_inputs(client: Client, tmp_path: Path, form: str) -> None:
    model = Cnn().eval()
    example = torch.randn(2, 3, 16, 16)
    script = torch.jit.trace(model, example) if form == "traced" else torch.jit.script(model)
    path = tmp_path / "model.pt"
    torch.jit.save(script, path)
    said = refusal(client, path)
    assert ("--input image:FP32:-1,3,16,16" if form == "traced" else "--input image:FP32:-1,3,224,224") in said
    version = client.push(form, path, inputs=["image:FP32:-1,3,-1,-1"], wait_s=300)
    assert version["batching_decided"] == "proven"
    images = np.random.default_rng(1).standard_normal((3, 3, 24, 20), np.float32)
    with torch.inference_mode():
        expected = model(torch.from_numpy(images)).numpy()
    assert np.allclose(client.predict(form, {"image": images})["output_0"], expected, rtol=1e-3, atol=1e-5)


def test_torchscript_from_the_command_line(stack: Stack, tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(Cnn().eval()), tmp_path / "m.pt")
    said = Millstream(stack.home).ok("push", "script", tmp_path / "m.pt", "--input", "image:FP32:-1,3,32,32")
    assert "ready" in said


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (["x:FP32:-1,3,16,16"], "no input 'x'"),
        (["image:FP32:-1,4,16,16"], "does not run on the inputs that are declared"),
        (["image:FLOAT:-1"], "an example: x:FP32:-1,3,224,224"),
    ],
)
def test_wrong_declarations_are_refused(client: Client, tmp_path: Path, inputs: list[str], said: str) -> None:
    torch.jit.save(torch.jit.script(Cnn().eval()), tmp_path / "m.pt")
    assert said in refusal(client, tmp_path / "m.pt", inputs=inputs)


def test_state_dicts_are_refused_with_advice(client: Client, tmp_path: Path) -> None:
    torch.save(Cnn().state_dict(), tmp_path / "weights.pt")
    assert "torch.onnx.export" in refusal(client, tmp_path / "weights.pt")
    torch.save(Cnn(), tmp_path / "module.pt")
    assert "torch.onnx.export" in refusal(client, tmp_path / "module.pt")


def test_damaged_files_are_refused(client: Client, tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(Cnn().eval()), tmp_path / "m.pt")
    content = (tmp_path / "m.pt").read_bytes()
    for size in (100, len(content) // 2, len(content) - 10):
        (tmp_path / "cut.pt").write_bytes(content[:size])
        assert refusal(client, tmp_path / "cut.pt", inputs=["image:FP32:-1,3,16,16"])
    at = content.index(b"_rebuild_tensor_v2")
    (tmp_path / "bent.pt").write_bytes(content[:at] + b"_rebuild_TENSOR_v2" + content[at + 18 :])
    assert refusal(client, tmp_path / "bent.pt", inputs=["image:FP32:-1,3,16,16"])
