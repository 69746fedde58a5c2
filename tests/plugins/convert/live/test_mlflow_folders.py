"""MLflow's model folders, pushed to a running product and called with MLflow's bodies."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import skl2onnx
from sklearn.datasets import load_iris
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.linear_model import LogisticRegression, Ridge

from millstream.client.client import Client
from millstream.services.errors import Failure
from tests.kit import pickles
from tests.kit.mlflow_folders import column_signature, mlflow_folder
from tests.kit.stack import Stack

X, Y = load_iris(return_X_y=True)
X = X.astype(np.float32)
COLUMNS = ["sepal length", "sepal width", "petal length", "petal width"]
ROWS = X[::20]
SKLEARN = {"sklearn": {"pickled_model": "model.pkl", "serialization_format": "cloudpickle", "sklearn_version": "1.6"}}
MODEL = LogisticRegression(max_iter=500).fit(X, load_iris().target_names[Y])


def sklearn_folder(folder: Path, columns: list[str] = COLUMNS) -> Path:
    return mlflow_folder(folder, SKLEARN, {"model.pkl": pickles.dumped(MODEL)}, column_signature(columns))


def invoke(stack: Stack, body: Any, model: str) -> Any:
    reply = stack.http.post("/invocations", json=body, headers={"X-Amzn-SageMaker-Target-Model": model})
    return reply.json() if reply.status_code == 200 else reply.json()["error"]


def test_a_model_of_scikit_learn_answers_the_four_bodies_by_name(stack: Stack, tmp_path: Path) -> None:
    with Client(stack.url, key=stack.key) as client:
        with pytest.raises(Failure, match="--allow-pickle"):
            client.push("mlflow-iris", sklearn_folder(tmp_path / "model"))
        version = client.push("mlflow-iris", tmp_path / "model", allow_pickle=True, wait_s=300)
    assert version["imported"] is not None
    assert version["imported"]["producer"].startswith("MLflow 3.5.0 (sklearn), scikit-learn ")
    turned = list(reversed(COLUMNS))
    bodies = [
        {"dataframe_split": {"columns": COLUMNS, "data": ROWS.tolist()}},
        {"dataframe_split": {"columns": turned, "data": ROWS[:, ::-1].tolist()}},
        {"dataframe_records": [dict(zip(turned, row[::-1], strict=True)) for row in ROWS.tolist()]},
        {"instances": ROWS.tolist()},
    ]
    labels = MODEL.predict(ROWS).tolist()
    for body in bodies:
        predictions = invoke(stack, body, "mlflow-iris")["predictions"]
        assert [one["label"] for one in predictions] == labels
        probabilities = [one["probabilities"] for one in predictions]
        assert np.allclose(probabilities, MODEL.predict_proba(ROWS), rtol=1e-3, atol=1e-5)
    columns = invoke(stack, {"inputs": ROWS.tolist()}, "mlflow-iris")["predictions"]
    assert columns["label"] == labels


@pytest.mark.parametrize(("form", "top"), [("zip", "."), ("gztar", "."), ("zip", "model"), ("tar", "model")])
def test_a_folder_may_come_as_an_archive(stack: Stack, tmp_path: Path, form: str, top: str) -> None:
    folder = sklearn_folder(tmp_path / "model")
    root = folder if top == "." else tmp_path
    archive = shutil.make_archive(str(tmp_path / "packed"), form, root, top)
    name = f"mlflow-{form}-{'below' if top != '.' else 'top'}"
    with Client(stack.url, key=stack.key) as client:
        version = client.push(name, archive, allow_pickle=True, wait_s=300)
    assert version["imported"] is not None
    assert version["imported"]["producer"].startswith("MLflow 3.5.0 (sklearn)")
    predictions = invoke(stack, {"instances": ROWS.tolist()}, name)["predictions"]
    assert [one["label"] for one in predictions] == MODEL.predict(ROWS).tolist()


def test_a_column_that_the_model_does_not_have_is_named(stack: Stack, tmp_path: Path) -> None:
    with Client(stack.url, key=stack.key) as client:
        client.push("mlflow-columns", sklearn_folder(tmp_path / "model"), allow_pickle=True, wait_s=300)
    wrong = {"columns": [*COLUMNS[:3], "width"], "data": ROWS.tolist()}
    assert "column 'width' is unknown" in invoke(stack, {"dataframe_split": wrong}, "mlflow-columns")
    few = {"columns": COLUMNS[:3], "data": ROWS[:, :3].tolist()}
    assert "column 'petal width' is missing" in invoke(stack, {"dataframe_split": few}, "mlflow-columns")


def test_the_flavour_onnx_is_served_with_its_signature(stack: Stack, tmp_path: Path) -> None:
    model = Ridge().fit(X, Y)
    content = skl2onnx.to_onnx(model, X[:1], target_opset={"": 18, "ai.onnx.ml": 3}).SerializeToString()
    flavours = {"onnx": {"onnx_version": "1.20.0", "data": "model.onnx"}}
    folder = mlflow_folder(tmp_path / "model", flavours, {"model.onnx": content}, column_signature(COLUMNS))
    with Client(stack.url, key=stack.key) as client:
        client.push("mlflow-onnx", folder, wait_s=300)
    body = {"dataframe_split": {"columns": COLUMNS[::-1], "data": ROWS[:, ::-1].tolist()}}
    predictions = np.array(invoke(stack, body, "mlflow-onnx")["predictions"])
    assert np.allclose(predictions.ravel(), model.predict(ROWS).ravel(), rtol=1e-3, atol=1e-4)


def test_null_is_refused_in_columns_of_integers_and_nan_in_others(stack: Stack, tmp_path: Path) -> None:
    """As MLflow's server does, by the types of the signature: the ONNX model has one input of floats."""
    model = HistGradientBoostingClassifier(max_iter=3).fit(X, Y)
    signature = column_signature(COLUMNS, integers=COLUMNS[1:2])
    folder = mlflow_folder(tmp_path / "model", SKLEARN, {"model.pkl": pickles.dumped(model)}, signature)
    with Client(stack.url, key=stack.key) as client:
        client.push("mlflow-null", folder, allow_pickle=True, wait_s=300)
    row = ROWS[0].tolist()
    missing = [None, *row[1:]]
    for columns in (COLUMNS, [0, 1, 2, 3]):
        body = {"dataframe_split": {"columns": columns, "data": [row, missing]}}
        labels = [one["label"] for one in invoke(stack, body, "mlflow-null")["predictions"]]
        assert labels == model.predict(np.array([row, [np.nan, *row[1:]]])).tolist()
        body = {"dataframe_split": {"columns": columns, "data": [row, [row[0], None, *row[2:]]]}}
        error = invoke(stack, body, "mlflow-null")
        assert error == f"line 1 has null in column '{COLUMNS[1]}', which is of integers: give a number"
    records = [dict(zip(COLUMNS, [row[0], None, *row[2:]], strict=True))]
    assert "has null in column" in invoke(stack, {"dataframe_records": records}, "mlflow-null")


BAD: dict[str, tuple[Mapping[str, Any], Mapping[str, bytes], list[str], str]] = {
    "no file": (SKLEARN, {}, COLUMNS, "has no 'model.pkl'"),
    "a file outside": ({"sklearn": {"pickled_model": "../../etc/passwd"}}, {}, COLUMNS, "leads out of the folder"),
    "no flavour": ({"prophet": {"data": "x"}}, {}, COLUMNS, "the flavours prophet, python_function"),
    "other columns": (
        SKLEARN,
        {"model.pkl": pickles.dumped(MODEL)},
        COLUMNS[:3],
        "has 3 columns, and its model takes 4",
    ),
    "hostile": (SKLEARN, {"model.pkl": pickles.HOSTILE["os.system"][0]}, COLUMNS, "posix.system"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_folder_that_cannot_be_served_is_refused(stack: Stack, tmp_path: Path, name: str) -> None:
    flavours, files, columns, says = BAD[name]
    folder = mlflow_folder(tmp_path / "model", flavours, files, column_signature(columns))
    with Client(stack.url, key=stack.key) as client:
        with pytest.raises(Failure) as caught:
            client.push("mlflow-bad", folder, allow_pickle=True)
        assert says in str(caught.value)
        assert "mlflow-bad" not in json.dumps(client.models())


@pytest.mark.parametrize("text", ["{", "a: &x [1]\nb: *x\nflavors: {}", "- 1", "flavors: 3"])
def test_a_broken_document_is_one_line(stack: Stack, tmp_path: Path, text: str) -> None:
    folder = sklearn_folder(tmp_path / "model")
    (folder / "MLmodel").write_text(text)
    with Client(stack.url, key=stack.key) as client, pytest.raises(Failure, match="MLflow model's MLmodel"):
        client.push("mlflow-bad", folder, allow_pickle=True)
