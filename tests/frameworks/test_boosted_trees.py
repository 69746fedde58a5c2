"""Boosted trees in the formats of their libraries, pushed to a running product and called over REST."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import catboost
import lightgbm
import numpy as np
import pytest
import xgboost
from sklearn.datasets import load_breast_cancer, load_iris

from millstream.client.client import Client
from millstream.services.errors import Failure
from tests.kit.stack import Stack

pytestmark = pytest.mark.frameworks

X, Y = load_iris(return_X_y=True)
X = X.astype(np.float32)
NAMES = load_iris().target_names
B, C = load_breast_cancer(return_X_y=True)
B = B.astype(np.float32)
PRICES = (Y * 1.5 + 10).astype(np.float32)


def pushed(stack: Stack, path: Path, rows: Any) -> dict[str, Any]:
    with Client(stack.url, key=stack.key) as client:
        version = client.push(path.stem, path, wait_s=300)
        assert version["imported"] is not None
        name = version["inputs"][0]["name"]
        return dict(client.predict(path.stem, {name: rows}))


def with_missing(rows: Any) -> Any:
    changed = rows[::10].copy()
    changed[::3, 1] = np.nan
    return changed


XGBOOST = {
    "xgb-binary": (xgboost.XGBClassifier(n_estimators=8), B, C),
    "xgb-multi": (xgboost.XGBClassifier(n_estimators=8), X, Y),
    "xgb-regression": (xgboost.XGBRegressor(n_estimators=8), X, PRICES),
    "xgb-poisson": (xgboost.XGBRegressor(n_estimators=8, objective="count:poisson"), X, Y),
}


@pytest.mark.parametrize("name", XGBOOST)
@pytest.mark.parametrize("kind", ["json", "ubj"])
def test_xgboost_answers_as_the_library_does(stack: Stack, tmp_path: Path, name: str, kind: str) -> None:
    model, rows, target = XGBOOST[name]
    model.fit(rows, target)
    model.save_model(tmp_path / f"{name}.{kind}")
    (tmp_path / name).write_bytes((tmp_path / f"{name}.{kind}").read_bytes())
    tried = with_missing(rows)
    answered = pushed(stack, tmp_path / name, tried)
    if hasattr(model, "predict_proba"):
        assert np.allclose(answered["probabilities"], model.predict_proba(tried), rtol=1e-3, atol=1e-5)
        assert answered["label"].tolist() == model.predict(tried).tolist()
    else:
        assert np.allclose(answered["variable"][:, 0], model.predict(tried), rtol=1e-3, atol=1e-5)


def test_a_ranking_of_xgboost_answers_scores(stack: Stack, tmp_path: Path) -> None:
    model = xgboost.XGBRanker(n_estimators=5).fit(X, Y, qid=np.zeros(len(Y)))
    model.save_model(tmp_path / "xgb-rank.ubj")
    answered = pushed(stack, tmp_path / "xgb-rank.ubj", X[::10])
    assert np.allclose(next(iter(answered.values()))[:, 0], model.predict(X[::10]), rtol=1e-3, atol=1e-4)


LIGHTGBM = {
    "lgb-binary": (lightgbm.LGBMClassifier(n_estimators=8, verbose=-1), B, C),
    "lgb-multi": (lightgbm.LGBMClassifier(n_estimators=8, verbose=-1), X, Y),
    "lgb-regression": (lightgbm.LGBMRegressor(n_estimators=8, verbose=-1), X, PRICES),
}


@pytest.mark.parametrize("name", LIGHTGBM)
def test_lightgbm_answers_as_the_library_does(stack: Stack, tmp_path: Path, name: str) -> None:
    model, rows, target = LIGHTGBM[name]
    model.fit(rows, target)
    model.booster_.save_model(tmp_path / name)
    tried = with_missing(rows)
    answered = pushed(stack, tmp_path / name, tried)
    if hasattr(model, "predict_proba"):
        assert np.allclose(answered["probabilities"], model.predict_proba(tried), rtol=1e-3, atol=1e-5)
        assert answered["label"].tolist() == model.predict(tried).tolist()
    else:
        assert np.allclose(answered["variable"][:, 0], model.predict(tried), rtol=1e-3, atol=1e-5)


CATBOOST = {
    "cat-binary": (catboost.CatBoostClassifier(8, verbose=0), B, C),
    "cat-multi": (catboost.CatBoostClassifier(8, verbose=0), X, Y),
    "cat-text-labels": (catboost.CatBoostClassifier(8, verbose=0), X, NAMES[Y]),
    "cat-binary-text": (catboost.CatBoostClassifier(8, verbose=0), B, np.array(["no", "yes"])[C]),
    "cat-regression": (catboost.CatBoostRegressor(iterations=8, verbose=0), X, PRICES),
}


@pytest.mark.parametrize("name", CATBOOST)
def test_catboost_answers_as_the_library_does(stack: Stack, tmp_path: Path, name: str) -> None:
    model, rows, target = CATBOOST[name]
    model.set_params(allow_writing_files=False)
    model.fit(rows, target)
    model.save_model(str(tmp_path / name))
    tried = with_missing(rows)
    answered = pushed(stack, tmp_path / name, tried)
    if hasattr(model, "predict_proba"):
        assert np.allclose(answered["probabilities"], model.predict_proba(tried), rtol=1e-3, atol=1e-5)
        assert [one.decode() if isinstance(one, bytes) else str(one) for one in answered["label"]] == [
            str(one) for one in model.predict(tried).ravel()
        ]
    else:
        assert np.allclose(answered["predictions"][:, 0], model.predict(tried), rtol=1e-3, atol=1e-5)


def damaged(model: Any, path: Path, bytes_less: int) -> Path:
    model.save_model(str(path))
    path.write_bytes(path.read_bytes()[:-bytes_less])
    return path


def test_what_cannot_be_converted_is_one_line(stack: Stack, tmp_path: Path) -> None:
    linear = xgboost.XGBRegressor(n_estimators=3, booster="gblinear").fit(X, PRICES)
    linear.save_model(tmp_path / "linear.ubj")
    short = damaged(xgboost.XGBRegressor(n_estimators=3).fit(X, PRICES), tmp_path / "short.ubj", 100)
    trees = damaged(
        lightgbm.LGBMRegressor(n_estimators=3, verbose=-1).fit(X, PRICES).booster_, tmp_path / "short", 3000
    )
    whole = (tmp_path / "whole", tmp_path / "noise")
    lightgbm.LGBMRegressor(n_estimators=3, verbose=-1).fit(X, PRICES).booster_.save_model(whole[0])
    whole[1].write_text(whole[0].read_text().replace("left_child=", "left_child=1000", 1))
    regression = catboost.CatBoostRegressor(iterations=3, verbose=0, allow_writing_files=False)
    cat = damaged(regression.fit(X, PRICES), tmp_path / "short.cbm", 100)
    table = np.array([["a", 1.0], ["b", 2.0]] * 20, dtype=object)
    categories = catboost.CatBoostRegressor(iterations=3, verbose=0, allow_writing_files=False)
    categories.fit(table, np.arange(40.0), cat_features=[0])
    categories.save_model(str(tmp_path / "categories.cbm"))
    says = {
        tmp_path / "linear.ubj": "gblinear",
        short: "XGBoost",
        trees: "cut short",
        whole[1]: "the LightGBM model is damaged: tree 0",
        cat: "CatBoost",
        tmp_path / "categories.cbm": "categorical",
    }
    with Client(stack.url, key=stack.key) as client:
        for path, words in says.items():
            with pytest.raises(Failure, match=words) as caught:
                client.push("refused", path)
            assert "\n" not in str(caught.value)
        assert "refused" not in [model["name"] for model in client.models()]
