"""What other servers have, made as their tools make it: pushed, served, and called over REST."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression

from millstream.client.client import Client
from millstream.services.errors import Failure
from tests.kit.archives import mar
from tests.kit.models import mlp
from tests.kit.stack import Stack, running_stack

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

X, Y = load_iris(return_X_y=True)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack")) as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, key=stack.key) as client:
        yield client


def scripted(path: Path) -> tuple[Any, bytes]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()
    torch.jit.save(torch.jit.script(model), path)
    return model, path.read_bytes()


def test_an_archive_of_torchserve(client: Client, tmp_path: Path) -> None:
    model, content = scripted(tmp_path / "m.pt")
    described = {"modelName": "m", "serializedFile": "m.pt", "handler": "handler.py", "extraFiles": "labels.txt"}
    files = {"m.pt": content, "handler.py": b"raise SystemExit", "labels.txt": b"a\nb\nc"}
    path = mar(tmp_path / "m.mar", described, files)
    version = client.push("mar", path, inputs=["input:FP32:-1,4"], wait_s=300)
    assert any("handler.py" in note for note in version["notes"])
    x = np.random.default_rng(1).standard_normal((3, 4)).astype(np.float32)
    expected = model(torch.from_numpy(x)).detach().numpy()
    assert np.allclose(client.predict("mar", {"input": x})["output_0"], expected, rtol=1e-3, atol=1e-5)


def test_an_archive_of_torchserve_with_onnx(client: Client, tmp_path: Path) -> None:
    content = mlp(tmp_path / "m.onnx").read_bytes()
    path = mar(tmp_path / "m.mar", {"serializedFile": "m.onnx", "handler": "h.py"}, {"m.onnx": content})
    assert client.push("onnx-mar", path, wait_s=300)["state"] == "ready"


def test_archives_of_torchserve_that_cannot_run(client: Client, tmp_path: Path) -> None:
    _, content = scripted(tmp_path / "m.pt")
    eager = mar(tmp_path / "a.mar", {"serializedFile": "m.pt", "modelFile": "model.py"}, {"m.pt": content})
    with pytest.raises(Failure, match=r"model\.py.*torch\.export\.save"):
        client.push("refused", eager)
    outside = mar(tmp_path / "b.mar", {"serializedFile": "m.pt"}, {"m.pt": content, "../../evil": b""})
    with pytest.raises(Failure, match="evil"):
        client.push("refused", outside)
    plain = mar(tmp_path / "c.mar", {"serializedFile": "m.txt"}, {"m.txt": b"this is no model at all, but text"})
    with pytest.raises(Failure, match="this is text"):
        client.push("refused", plain)


def test_a_folder_of_mlserver(client: Client, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    model = LogisticRegression(max_iter=500).fit(X, Y)
    joblib.dump(model, folder / "iris.joblib")
    settings = {
        "name": "iris",
        "implementation": "mlserver_sklearn.SKLearnModel",
        "parameters": {"uri": "./iris.joblib"},
    }
    (folder / "model-settings.json").write_text(json.dumps(settings))
    with pytest.raises(Failure, match="--allow-pickle"):
        client.push("mlserver", folder)
    client.push("mlserver", folder, allow_pickle=True, wait_s=300)
    rows = X[::20].astype(np.float32)
    answered = client.predict("mlserver", {"input": rows})
    assert answered["label"].ravel().tolist() == model.predict(rows).tolist()


def test_a_folder_of_mlserver_with_code(client: Client, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model-settings.json").write_text('{"name": "m", "implementation": "models.Mine"}')
    (tmp_path / "model" / "models.py").write_text("raise SystemExit")
    with pytest.raises(Failure, match=r"'models\.Mine' is a class in Python"):
        client.push("refused", tmp_path / "model")


def test_a_folder_of_tensorflow_serving(client: Client, tmp_path: Path) -> None:
    tensorflow = pytest.importorskip("tensorflow")

    class Twice(tensorflow.Module):  # type: ignore[misc, name-defined]
        @tensorflow.function(input_signature=[tensorflow.TensorSpec([None, 4], tensorflow.float32, name="x")])  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            return {"y": x * self.factor}

    for number, factor in (("1", 2.0), ("10", 3.0)):
        module = Twice()
        module.factor = tensorflow.constant(factor)
        tensorflow.saved_model.save(module, str(tmp_path / "model" / number), signatures=module.__call__)
    version = client.push("serving", tmp_path / "model", wait_s=300)
    assert any("the versions 1, too" in note for note in version["notes"])
    x = np.ones((3, 4), np.float32)
    assert np.allclose(client.predict("serving", {"x": x})["y"], 3 * x)
