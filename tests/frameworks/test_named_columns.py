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
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import VotingClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.naive_bayes import GaussianNB
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, KBinsDiscretizer, OneHotEncoder, OrdinalEncoder, StandardScaler
from sklearn.tree import DecisionTreeClassifier

from millstream.client.client import Client
from millstream.services.errors import Failure
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
    assert "column 'city' " in numbers and "bern, kiel, lima, oslo, rome" in numbers
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


# --- pipelines of scikit-learn ---

MIXED = pd.DataFrame(
    {
        "sex": random.choice(["female", "male"], ROWS),
        "city": random.choice(CITIES, ROWS),
        "age": random.random(ROWS) * 60,
        "class": random.integers(1, 4, ROWS),
        "not used": random.choice(["x", "y"], ROWS),
    }
)
SURVIVED = np.where((MIXED["age"] > 30) ^ (MIXED["sex"] == "male"), "yes", "no")
MIXED.loc[::17, "age"] = np.nan
MIXED.loc[::13, "city"] = None
NUMERIC = make_pipeline(SimpleImputer(strategy="median"), StandardScaler())


def with_text(*steps: Any, drop: str = "") -> Any:
    """A classifier of tables with text, whose columns of text go through these steps."""
    columns = [name for name in ("sex", "city") if name != drop]
    first = ColumnTransformer([("text", make_pipeline(*steps), columns), ("numbers", NUMERIC, ["age", "class"])])
    return make_pipeline(first, LogisticRegression()).fit(MIXED, SURVIVED)


IGNORE = OneHotEncoder(handle_unknown="ignore")
PIPELINES = {
    "s-titanic": with_text(SimpleImputer(strategy="most_frequent"), IGNORE),
    "s-constant": with_text(SimpleImputer(strategy="constant", fill_value="none"), IGNORE),
    "s-category": with_text(OneHotEncoder(handle_unknown="ignore")),
    "s-closed": with_text(OrdinalEncoder(), drop="city"),
    "s-onehot": with_text(OneHotEncoder(), drop="city"),
}
ASKED = MIXED.iloc[[2, 7, 30, 101]]


@pytest.fixture(scope="module")
def pipelines(stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("pipelines")
    with Client(stack.url, key=stack.key) as client:
        for name, model in PIPELINES.items():
            joblib.dump(model, folder / name)
            client.push(name, folder / name, allow_pickle=True, wait_s=300)


@pytest.mark.usefixtures("pipelines")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_of_mixed_columns_answers_as_scikit_learn_does(stack: Stack, name: str, way: str) -> None:
    model = PIPELINES[name]
    for rows in (ASKED, ASKED[ASKED.columns[::-1]], ASKED.drop(columns="not used")):
        answered = WAYS[way](stack, name, table_of(rows), "probabilities")
        assert not isinstance(answered, str), answered
        np.testing.assert_allclose(answered, model.predict_proba(ASKED), rtol=1e-3, atol=1e-5)
        labels = WAYS[way](stack, name, table_of(rows), "label")
        assert labels.ravel().tolist() == model.predict(ASKED).tolist()
    other = ASKED.assign(sex=["male", "other", "female", "female"])
    answered = WAYS[way](stack, name, table_of(other), "probabilities")
    if name in {"s-closed", "s-onehot"}:  # as scikit-learn
        assert "column 'sex' has 'other' in row 1, a category that the model was not fitted with" in answered
    else:
        np.testing.assert_allclose(answered, model.predict_proba(other), rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("pipelines")
@pytest.mark.parametrize("way", ["dataframe_split", "csv", "instances", "columnar inputs", "v2", "TorchServe"])
@pytest.mark.parametrize("name", PIPELINES)
def test_missing_text_and_numbers(stack: Stack, name: str, way: str) -> None:
    rows = ASKED.assign(city=[None, "rome", None, "oslo"], age=[1.0, np.nan, 30.0, np.nan])
    table = {**table_of(rows), "city": [None, "rome", None, "oslo"], "age": [1.0, None, 30.0, None]}
    if way == "v2":
        table = {**table, "city": ["", "rome", "", "oslo"], "age": [1.0, 2.0, 30.0, 4.0]}
        rows = rows.assign(age=[1.0, 2.0, 30.0, 4.0])
    answered = WAYS[way](stack, name, table, "probabilities")
    assert not isinstance(answered, str), answered
    np.testing.assert_allclose(answered, PIPELINES[name].predict_proba(rows), rtol=1e-3, atol=1e-5)
    for value in (None, ""):
        if way != "v2" or value == "":
            refused = WAYS[way](stack, name, {**table, "sex": ["male", value, "male", "male"]}, "probabilities")
            assert isinstance(refused, str) is (name in {"s-closed", "s-onehot"}), refused
            if not isinstance(refused, str):
                asked = rows.assign(sex=["male", None, "male", "male"])
                np.testing.assert_allclose(refused, PIPELINES[name].predict_proba(asked), rtol=1e-3, atol=1e-5)


LABELLED = {
    "l-text": np.where(MIXED["class"] > 2, "big", "small"),
    "l-bool": np.asarray(MIXED["class"] > 2),
    "l-int": np.asarray(MIXED["class"]),
}


@pytest.mark.parametrize("name", LABELLED)
def test_labels_keep_their_types(stack: Stack, tmp_path: Path, name: str) -> None:
    rows = MIXED[["class"]]
    model = LogisticRegression().fit(rows, LABELLED[name])
    joblib.dump(model, tmp_path / name)
    with Client(stack.url, key=stack.key) as client:
        client.push(name, tmp_path / name, allow_pickle=True, wait_s=300)
        answered = client.predict(name, rows[:5])
    expected = model.predict(rows[:5])
    labels = answered["label"]
    assert labels.tolist() == expected.tolist()
    assert {type(label) for label in labels.tolist()} == {type(label) for label in expected.tolist()}
    for way in ("dataframe_split", "instances", "v2", "TorchServe"):
        sent = WAYS[way](stack, name, table_of(rows[:5]), "label")
        assert sent.tolist() == expected.tolist()
        assert sent.dtype.kind == expected.dtype.kind


class Mine(TransformerMixin, BaseEstimator):  # type: ignore[misc]
    def fit(self, rows: Any, labels: Any = None) -> Any:
        self.n_features_in_ = rows.shape[1]
        return self

    def transform(self, rows: Any) -> Any:
        return np.asarray(rows) ** 2


NUMBERS_ONLY = MIXED[["age"]].fillna(20)
REFUSED = {
    "function": (make_pipeline(FunctionTransformer(np.log1p), LogisticRegression()), "numpy.log1p"),
    "own class": (make_pipeline(Mine(), LogisticRegression()), "Mine"),
    "no form": (make_pipeline(KBinsDiscretizer(3), LogisticRegression()), "skl2onnx"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_step_that_has_no_form_in_onnx_says_what_to_do(stack: Stack, tmp_path: Path, name: str) -> None:
    model, says = REFUSED[name]
    joblib.dump(model.fit(NUMBERS_ONLY, SURVIVED), tmp_path / "model")
    with Client(stack.url, key=stack.key) as client, pytest.raises(Failure) as caught:
        client.push("no-form", tmp_path / "model", allow_pickle=True)
    message = str(caught.value)
    assert says in message
    assert "export the model to ONNX where it was made" in message
    assert "push it with --allow-code" in message
    assert "\n" not in message


def test_votes_are_counted(stack: Stack, tmp_path: Path) -> None:
    """VotingClassifier's default has no probabilities."""
    rows = MIXED[["class"]]
    model = VotingClassifier([("a", LogisticRegression()), ("b", GaussianNB()), ("c", DecisionTreeClassifier())])
    joblib.dump(model.fit(rows, SURVIVED), tmp_path / "model")
    with Client(stack.url, key=stack.key) as client:
        client.push("votes", tmp_path / "model", allow_pickle=True, wait_s=300)
        answered = client.predict("votes", rows[:9])
    assert list(answered) == ["label"]
    assert answered["label"].tolist() == model.predict(rows[:9]).tolist()
