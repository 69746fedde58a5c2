"""Models of scikit-learn, written by joblib, pickle and skops, pushed to a running product and called over REST."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas as pd
import pytest
import skops.io
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier
from sklearn.feature_selection import SelectKBest, f_classif
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, OneHotEncoder, StandardScaler
from sklearn.svm import LinearSVC

from millstream.client.client import Client
from tests.kit.stack import Stack

pytestmark = pytest.mark.frameworks

X, Y = load_iris(return_X_y=True)
NAMES = load_iris().target_names
ROWS = X[::10].astype(np.float32)


def answers(stack: Stack, model: str, rows: Any) -> dict[str, np.ndarray[Any, Any]]:
    with Client(stack.url, key=stack.key) as client:
        return client.predict(model, {"input": rows})


def saved(path: Path, model: Any) -> Path:
    joblib.dump(model, path)
    return path


ESTIMATORS = {
    "classifier": make_pipeline(StandardScaler(), LogisticRegression()).fit(X, NAMES[Y]),
    "forest": RandomForestClassifier(10, random_state=0).fit(X, Y),
    "without-probabilities": LinearSVC().fit(X, Y),
    "selection": make_pipeline(SelectKBest(f_classif, k=2), LogisticRegression()).fit(X, Y),
}


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("write", [joblib.dump, lambda m, p: joblib.dump(m, p, compress=3), skops.io.dump])
def test_a_classifier_answers_as_scikit_learn_does(stack: Stack, tmp_path: Path, name: str, write: Any) -> None:
    model = ESTIMATORS[name]
    write(model, tmp_path / "file")
    with Client(stack.url, key=stack.key) as client:
        version = client.push(name, tmp_path / "file", allow_pickle=write is not skops.io.dump, wait_s=300)
    assert version["imported"] is not None
    answered = answers(stack, name, ROWS)
    labels = answered["label"]
    assert [one.decode() if isinstance(one, bytes) else str(one) for one in labels.ravel()] == [
        str(label) for label in model.predict(ROWS)
    ]
    scores = model.predict_proba(ROWS) if hasattr(model, "predict_proba") else model.decision_function(ROWS)
    assert np.allclose(answered["probabilities"], scores, rtol=1e-3, atol=1e-5)


def test_a_table_with_text_has_an_input_for_each_column(stack: Stack, tmp_path: Path) -> None:
    table = pd.DataFrame({"sex": ["f", "m", "f", "m"] * 10, "age": np.arange(40.0), "fare": np.arange(40.0) ** 2})
    columns = ColumnTransformer([("text", OneHotEncoder(), ["sex"]), ("numbers", StandardScaler(), ["age", "fare"])])
    model = make_pipeline(columns, LogisticRegression()).fit(table, [0, 1, 0, 0] * 10)
    joblib.dump(model, tmp_path / "table")
    with Client(stack.url, key=stack.key) as client:
        client.push("table", tmp_path / "table", allow_pickle=True, wait_s=300)
        rows = table[:6]
        inputs = {
            "sex": rows["sex"].to_numpy(dtype=object).reshape(-1, 1),
            "age": rows["age"].to_numpy(dtype=np.float32).reshape(-1, 1),
            "fare": rows["fare"].to_numpy(dtype=np.float32).reshape(-1, 1),
        }
        answered = client.predict("table", inputs)
    assert np.allclose(answered["probabilities"], model.predict_proba(rows), rtol=1e-3, atol=1e-5)


def test_columns_keep_names_that_are_no_identifiers(stack: Stack, tmp_path: Path) -> None:
    names = ["petal (cm)", "petal_cm_", "1st", "a/b", "e\u0301", "left out"]
    table = pd.DataFrame(np.random.default_rng(1).random((40, 6)), columns=names)
    columns = ColumnTransformer([("one", StandardScaler(), [names[2], names[0]]), ("two", MinMaxScaler(), names[3:5])])
    model = make_pipeline(columns, LogisticRegression()).fit(table, [0, 1] * 20)
    joblib.dump(model, tmp_path / "named")
    rows = table[:5].astype(np.float32)
    with Client(stack.url, key=stack.key) as client:
        client.push("named", tmp_path / "named", allow_pickle=True, wait_s=300)
        answered = client.predict("named", {name: rows[name].to_numpy().reshape(-1, 1) for name in names})
    assert np.allclose(answered["probabilities"], model.predict_proba(rows), rtol=1e-3, atol=1e-5)
