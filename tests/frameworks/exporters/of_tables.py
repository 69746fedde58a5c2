"""Exports small models of tables: skl2onnx, onnxmltools and CatBoost, at their defaults. python of_tables.py FOLDER"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import catboost
import lightgbm
import numpy as np
import onnxmltools
import skl2onnx
import xgboost
from onnxmltools.convert.common.data_types import FloatTensorType
from skl2onnx.common.data_types import StringTensorType
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.multioutput import MultiOutputClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

X = np.random.default_rng(0).normal(size=(80, 4)).astype(np.float32)
CLASSES = np.digitize(X[:, 0], [-0.5, 0.5])
NAMES = np.array(["cat", "dog", "eel"])[CLASSES]
TEXTS = ["red cat", "dog", "big eel"] * 5


def _sklearn(folder: Path) -> None:
    many = np.stack([CLASSES > 0, CLASSES > 1], 1).astype(int)
    fitted = {
        "mlp": MLPClassifier(max_iter=10).fit(X, CLASSES),
        "classifier": LogisticRegression().fit(X, NAMES),
        "trees": RandomForestClassifier(5).fit(X, NAMES),
        "gradient boosting": HistGradientBoostingClassifier(max_iter=5).fit(X, CLASSES),
        "pipeline": make_pipeline(StandardScaler(), LogisticRegression()).fit(X, NAMES),
        "several outputs": MultiOutputClassifier(LogisticRegression()).fit(X, many),
    }
    for name, model in fitted.items():
        _save(folder, f"skl2onnx; {name}", skl2onnx.to_onnx(model, X[:1]))
    columns = skl2onnx.to_onnx(fitted["pipeline"], X[:1], options={"zipmap": "columns"})
    _save(folder, "skl2onnx; probabilities in columns", columns)
    texts = make_pipeline(TfidfVectorizer(), LogisticRegression()).fit(TEXTS, ["a", "b", "c"] * 5)
    _save(folder, "skl2onnx; TF-IDF", skl2onnx.to_onnx(texts, initial_types=[("text", StringTensorType([None, 1]))]))


def _save(folder: Path, name: str, model: Any) -> None:
    (folder / f"{name}.onnx").write_bytes(model.SerializeToString())


def main(folder: Path) -> None:
    warnings.simplefilter("ignore")
    _sklearn(folder)
    types = [("input", FloatTensorType([None, 4]))]
    trees = {"n_estimators": 4, "max_depth": 2}
    classifier = xgboost.XGBClassifier(**trees).fit(X, CLASSES)
    _save(folder, "onnxmltools, XGBoost; trees", onnxmltools.convert_xgboost(classifier, initial_types=types))
    forest = lightgbm.LGBMClassifier(**trees, verbose=-1).fit(X, NAMES)
    _save(folder, "onnxmltools, LightGBM; trees", onnxmltools.convert_lightgbm(forest, initial_types=types))
    boosted = catboost.CatBoostClassifier(iterations=4, depth=2, verbose=0, allow_writing_files=False).fit(X, NAMES)
    boosted.save_model(str(folder / "CatBoost; trees.onnx"), format="onnx")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
