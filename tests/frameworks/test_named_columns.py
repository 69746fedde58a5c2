"""Models that were fitted with DataFrames, called by the names of their columns in every protocol.

Each answer is the framework's own to the same DataFrame.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import catboost
import joblib
import lightgbm
import numpy as np
import pandas as pd
import pytest
import xgboost

from millstream.services.client.client import Client
from tests.kit.stack import Stack
from tests.kit.tables import WAYS, Table

pytestmark = pytest.mark.frameworks

ROWS = 400
CITIES = ["rome", "oslo", "bern", "kiel", "lima"]
random = np.random.default_rng(3)
TABLE = pd.DataFrame(
    {
        "age (years)": random.integers(18, 80, ROWS),
        "city": pd.Categorical(random.choice(CITIES, ROWS)),
        "size": pd.Categorical(random.choice([10, 20, 30], ROWS)),
        "fare": random.random(ROWS) * 50,
        "member": random.random(ROWS) > 0.5,
    }
)
LABELS = (
    (TABLE["age (years)"] > 40) ^ TABLE["city"].isin(["rome", "lima"]) ^ (TABLE["size"] == 20) ^ TABLE["member"]
).astype(int)
NUMBERS = TABLE[["age (years)", "fare", "member"]]
TRIED = TABLE.iloc[[3, 50, 117, 256, 399]]


def boosters(folder: Path) -> dict[str, tuple[Path, Any, pd.DataFrame, str]]:
    """Name -> file, what the library answers to the rows that are tried, these rows, the output with the answers."""
    xgb = xgboost.XGBClassifier(n_estimators=12, enable_categorical=True, max_depth=4).fit(TABLE, LABELS)
    other = TABLE.assign(city=TABLE["city"].cat.rename_categories({"kiel": "köln"}))
    lgb = lightgbm.LGBMClassifier(n_estimators=12, min_child_samples=3, verbose=-1).fit(other, LABELS)
    xgb_other = xgboost.XGBClassifier(n_estimators=2, enable_categorical=True).fit(other, LABELS)
    cat = catboost.CatBoostClassifier(12, verbose=0, allow_writing_files=False).fit(NUMBERS, LABELS)
    regression = xgboost.XGBRegressor(n_estimators=5).fit(NUMBERS, LABELS)
    plain = xgboost.XGBClassifier(n_estimators=12).fit(NUMBERS, LABELS)
    xgb.save_model(folder / "t-xgb.ubj")
    xgb.save_model(folder / "t-xgb-json.json")
    xgb_other.save_model(folder / "t-xgb-other.ubj")
    lgb.booster_.save_model(folder / "t-lgb.txt")
    cat.save_model(str(folder / "t-cat.cbm"))
    regression.save_model(folder / "t-xgb-regression.ubj")
    joblib.dump(plain, folder / "t-xgb-joblib.pkl")
    numbers, tried = TRIED[NUMBERS.columns], other.loc[TRIED.index]
    return {
        "t-xgb": (folder / "t-xgb.ubj", xgb.predict_proba(TRIED), TRIED, "probabilities"),
        "t-xgb-json": (folder / "t-xgb-json.json", xgb.predict_proba(TRIED), TRIED, "probabilities"),
        "t-xgb-other": (folder / "t-xgb-other.ubj", None, TRIED, "probabilities"),
        "t-lgb": (folder / "t-lgb.txt", lgb.predict_proba(tried), tried, "probabilities"),
        "t-cat": (folder / "t-cat.cbm", cat.predict_proba(numbers), numbers, "probabilities"),
        "t-xgb-regression": (
            folder / "t-xgb-regression.ubj",
            regression.predict(numbers).reshape(-1, 1),
            numbers,
            "variable",
        ),
        "t-xgb-joblib": (folder / "t-xgb-joblib.pkl", plain.predict_proba(numbers), numbers, "probabilities"),
    }


@pytest.fixture(scope="module")
def served(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any, pd.DataFrame, str]]:
    models = boosters(tmp_path_factory.mktemp("models"))
    with Client(stack.url, key=stack.key) as client:
        for name, (path, *_) in models.items():
            client.push(name, path, allow_pickle=path.suffix == ".pkl", wait_s=300)
    return models


def table_of(rows: pd.DataFrame) -> Table:
    return {name: rows[name].tolist() for name in rows.columns}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["t-xgb", "t-xgb-json", "t-lgb", "t-cat", "t-xgb-regression", "t-xgb-joblib"])
def test_answers_are_those_of_the_library(stack: Stack, served: Any, name: str, way: str) -> None:
    _, expected, rows, output = served[name]
    for table in (rows, rows[rows.columns[::-1]]):
        answered = WAYS[way](stack, name, table_of(table), output)
        assert not isinstance(answered, str), answered
        np.testing.assert_allclose(answered, expected, rtol=1e-3, atol=1e-5)
    unknown = WAYS[way](stack, name, {**table_of(rows), "fares": [1.0] * len(rows)}, output)
    assert "column 'fares' is unknown; did you mean 'fare'" in unknown or "did you mean 'fare'" in unknown


@pytest.mark.parametrize("way", WAYS)
def test_a_category_of_no_training(stack: Stack, served: Any, way: str) -> None:
    """XGBoost refuses it, LightGBM takes it for a missing value."""
    rows = table_of(TRIED)
    rows = {**rows, "city": ["Rome", *rows["city"][1:]]}
    refused = WAYS[way](stack, "t-xgb", rows, "probabilities")
    assert refused.startswith("400 ")
    assert "column 'city' has 'Rome' in row 0, a category that the model was not fitted with" in refused
    assert "did you mean 'rome'?: it has bern, kiel, lima, oslo, rome" in refused
    uncertain = WAYS[way](stack, "t-xgb-other", rows, "probabilities")
    assert "the model's file does not say the categories of column 'city'" in uncertain
    answered = WAYS[way](stack, "t-lgb", rows, "probabilities")
    library = lightgbm.Booster(model_file=served["t-lgb"][0])
    frame = TRIED.assign(city=pd.Categorical(rows["city"]))
    np.testing.assert_allclose(answered[:, 1], library.predict(frame), rtol=1e-3, atol=1e-5)
    numbers = WAYS[way](stack, "t-xgb", {**rows, "city": [0, 1, 2, 3, 4]}, "probabilities")
    assert "column 'city' takes its categories bern, kiel, lima, oslo, rome, and has numbers" in numbers
    sizes = WAYS[way](stack, "t-xgb", {**table_of(TRIED), "size": [10, 20, 30, 40, 10]}, "probabilities")
    assert "column 'size' has '40' in row 3" in sizes


@pytest.mark.parametrize("way", ["dataframe_split", "csv", "instances", "columnar inputs"])
@pytest.mark.parametrize("name", ["t-xgb", "t-lgb"])
def test_a_missing_value(stack: Stack, served: Any, name: str, way: str) -> None:
    rows = table_of(TRIED)
    rows = {**rows, "city": [None, *rows["city"][1:]], "fare": [None, *rows["fare"][1:]]}
    answered = WAYS[way](stack, name, rows, "probabilities")
    frame = TRIED.assign(city=TRIED["city"].where(TRIED.index != TRIED.index[0]))
    frame["fare"] = [np.nan, *frame["fare"][1:]]
    if name == "t-lgb":
        expected = lightgbm.Booster(model_file=served[name][0]).predict(frame)
    else:
        library = xgboost.Booster(model_file=served[name][0])
        expected = library.predict(xgboost.DMatrix(frame, enable_categorical=True))
    np.testing.assert_allclose(answered[:, 1], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["t-xgb", "t-lgb"])
def test_rows_without_names_hold_codes(stack: Stack, served: Any, name: str) -> None:
    _, expected, rows, _ = served[name]
    coded = rows.assign(city=rows["city"].cat.codes, size=rows["size"].cat.codes).astype(float).to_numpy()
    document = stack.http.post(f"/v1/models/{name}:predict", json={"instances": coded.tolist()}).json()
    np.testing.assert_allclose([one["probabilities"] for one in document["predictions"]], expected, rtol=1e-3)
    split = {"dataframe_split": {"data": coded.tolist()}}
    headers = {"X-Amzn-SageMaker-Target-Model": name}
    document = stack.http.post("/invocations", json=split, headers=headers).json()
    np.testing.assert_allclose([one["probabilities"] for one in document["predictions"]], expected, rtol=1e-3)
