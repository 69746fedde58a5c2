"""docs/accelerators.md: the commands that push a framework's file run as they are written, and the models answer."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from millstream.client.client import Client
from tests.kit import jax_models, tensorflow_models
from tests.kit.archives import mar
from tests.kit.command_line import ROOT, Millstream
from tests.kit.stack import Stack, running_stack

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]

PAGE = (ROOT / "docs/accelerators.md").read_text()
PUSHES = dict(re.findall(r"^\| ([^|]+) \| `millstream push m ([^`]+)`", PAGE, re.MULTILINE))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("stack"), pools="cpu=1,jax=1,backend=jax") as running:
        yield running


def module() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)).eval()


def saved_model(folder: Path) -> None:
    tensorflow_models.cnn(folder / "saved_model")


def keras_file(folder: Path) -> None:
    program = "import sys, keras; keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)]).save(sys.argv[1])"
    command = [sys.executable, "-c", program, str(folder / "model.keras")]
    subprocess.run(command, check=True, capture_output=True, env={"KERAS_BACKEND": "torch", "HOME": str(folder)})


def versions(folder: Path) -> None:
    saved_model(folder)
    (folder / "versions").mkdir()
    shutil.move(folder / "saved_model", folder / "versions" / "1")


def lite(folder: Path) -> None:
    saved_model(folder)
    tensorflow_models.lite(folder / "saved_model", folder / "model.tflite")


def program(folder: Path) -> None:
    shapes = ({0: torch.export.Dim("rows")},)
    torch.export.save(torch.export.export(module(), (torch.zeros(2, 4),), dynamic_shapes=shapes), folder / "model.pt2")


def scripted(folder: Path) -> None:
    torch.jit.save(torch.jit.script(module()), folder / "scripted.pt")


def archive(folder: Path) -> None:
    program(folder)
    content = {"model.pt2": (folder / "model.pt2").read_bytes()}
    mar(folder / "model.mar", {"modelName": "m", "serializedFile": "model.pt2", "handler": "base_handler"}, content)


def hub_folder(folder: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = BertForSequenceClassification(BertConfig(**sizes, intermediate_size=32)).eval()
    model.save_pretrained(folder / "hub_folder")


def function(folder: Path) -> None:
    jax_models.mlp(folder / "function.jax")


MAKERS = {
    "TensorFlow": saved_model,
    "Keras": keras_file,
    "TF Serving": versions,
    "TF Lite": lite,
    "PyTorch": program,
    "TorchScript": scripted,
    "TorchServe": archive,
    "Hugging Face Transformers": hub_folder,
    "JAX": function,
}


def test_each_command_has_its_file() -> None:
    assert PUSHES.keys() == MAKERS.keys()


@pytest.mark.parametrize("framework", MAKERS)
def test_a_pushed_model_answers(stack: Stack, tmp_path: Path, framework: str) -> None:
    MAKERS[framework](tmp_path)
    file, *options = PUSHES[framework].split()
    name = re.sub(r"\W", "-", framework.lower())
    Millstream(stack.home).ok("push", name, tmp_path / file, *options)
    with Client(stack.url, key=stack.key) as client:
        usage = client.version(name, 1)["usage"]
    assert usage is not None
    answer = stack.http.post(f"/v2/models/{name}/infer", content=json.dumps(usage["example"]).encode())
    assert answer.status_code == 200, answer.text


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(tests/[\w/.]+)`", PAGE)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
