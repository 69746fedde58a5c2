"""Handlers of TorchServe with PyTorch: classes that extend its own, and its classifier of images, compared."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.kit.archives import mar
from tests.kit.stack import Stack

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

NET = """
import torch

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(28 * 28, 10)

    def forward(self, x):
        return torch.log_softmax(self.layer(x.flatten(1)), dim=1)
"""
HANDLER = """
import numpy, torch
from ts.torch_handler.image_classifier import ImageClassifier

class Digits(ImageClassifier):
    image_processing = staticmethod(lambda image: torch.from_numpy(numpy.asarray(image).astype("float32") / 255)[None])

    def postprocess(self, data):
        return data.argmax(1).tolist()
"""


def png(shape: tuple[int, ...], seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def net() -> Any:
    scope: dict[str, Any] = {}
    exec(NET, scope)
    torch.manual_seed(3)
    return scope["Net"]().eval()


def test_a_class_that_extends_the_classifier_loads_weights_of_its_model_file(stack: Stack, tmp_path: Path) -> None:
    model = net()
    torch.save(model.state_dict(), tmp_path / "digits.pt")
    described = {"modelName": "digits", "serializedFile": "digits.pt", "modelFile": "net.py", "handler": "digits.py"}
    files: dict[str, str | bytes] = {
        "digits.pt": (tmp_path / "digits.pt").read_bytes(),
        "net.py": NET,
        "digits.py": HANDLER,
    }
    stack.push("digits", mar(tmp_path / "digits.mar", described, files))
    for seed in range(5):
        image = png((28, 28), seed)
        pixels = torch.from_numpy(np.asarray(Image.open(io.BytesIO(image))).astype("float32") / 255)
        answer = stack.http.post("/predictions/digits", files={"data": image}).raise_for_status()
        assert answer.json() == int(model(pixels[None, None]).argmax(1))
        assert stack.http.post("/predictions/digits", content=image).json() == answer.json()


def test_the_classifier_of_images_answers_labels_with_their_probabilities(stack: Stack, tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 7, 4), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(8, 6)
    ).eval()
    torch.jit.save(torch.jit.script(model), tmp_path / "m.pt")
    labels = {str(at): ["n0", f"label {at}"] for at in range(6)}
    files: dict[str, str | bytes] = {"m.pt": (tmp_path / "m.pt").read_bytes(), "index_to_name.json": json.dumps(labels)}
    described = {"modelName": "m", "serializedFile": "m.pt", "handler": "image_classifier"}
    stack.push("images", mar(tmp_path / "m.mar", described, files))
    image = png((300, 420, 3), 1)
    opened = Image.open(io.BytesIO(image)).resize((358, 256), Image.Resampling.BILINEAR).crop((67, 16, 291, 240))
    numbers = torch.from_numpy(np.asarray(opened).copy()).permute(2, 0, 1).float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = torch.softmax(model(((numbers - mean[:, None, None]) / std[:, None, None])[None]), dim=1)[0]
    answer = stack.http.post("/predictions/images", content=image).raise_for_status().json()
    best = expected.topk(5)
    assert list(answer) == [f"label {at}" for at in best.indices.tolist()]
    assert list(answer.values()) == pytest.approx(best.values.tolist(), rel=1e-4)
