"""Classical models converted by skl2onnx are proven, and their rows are independent when they run."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from skl2onnx import convert_sklearn
from skl2onnx.common.data_types import FloatTensorType, Int64TensorType, StringTensorType
from sklearn import (
    base,
    calibration,
    cluster,
    compose,
    decomposition,
    discriminant_analysis,
    ensemble,
    feature_extraction,
    feature_selection,
    impute,
    linear_model,
    naive_bayes,
    neighbors,
    neural_network,
    pipeline,
    preprocessing,
    svm,
    tree,
)
from sklearn.datasets import load_iris

from millstream.plugins.proof.analysis import prove
from millstream.services.ingest.proof import Proof
from tests.kit.independence import assert_independent, load, run_alone

OPSETS = {"": 17, "ai.onnx.ml": 3}

MODELS = [
    ensemble.RandomForestClassifier(5, random_state=0),
    ensemble.RandomForestRegressor(5, random_state=0),
    ensemble.GradientBoostingClassifier(n_estimators=5, random_state=0),
    ensemble.GradientBoostingRegressor(n_estimators=5, random_state=0),
    ensemble.HistGradientBoostingClassifier(max_iter=5),
    ensemble.HistGradientBoostingRegressor(max_iter=5),
    ensemble.AdaBoostClassifier(n_estimators=3),
    ensemble.AdaBoostRegressor(n_estimators=3, random_state=0),
    ensemble.BaggingClassifier(n_estimators=3, random_state=0),
    ensemble.IsolationForest(n_estimators=3, random_state=0),
    ensemble.StackingClassifier([("a", linear_model.LogisticRegression()), ("b", naive_bayes.GaussianNB())]),
    tree.DecisionTreeClassifier(),
    linear_model.LogisticRegression(),
    linear_model.Ridge(),
    linear_model.SGDClassifier(random_state=0),
    svm.SVC(),
    svm.SVR(),
    svm.OneClassSVM(),
    neighbors.KNeighborsClassifier(),
    neighbors.KNeighborsRegressor(),
    neighbors.LocalOutlierFactor(novelty=True),
    cluster.KMeans(3, n_init=2, random_state=0),
    decomposition.PCA(2),
    naive_bayes.GaussianNB(),
    discriminant_analysis.LinearDiscriminantAnalysis(),
    calibration.CalibratedClassifierCV(svm.LinearSVC()),
    neural_network.MLPClassifier((5,), max_iter=1000, random_state=0),
    pipeline.make_pipeline(preprocessing.MinMaxScaler(), decomposition.PCA(2), linear_model.LogisticRegression()),
    pipeline.make_pipeline(impute.SimpleImputer(), preprocessing.RobustScaler(), svm.SVC()),
    pipeline.make_pipeline(preprocessing.PolynomialFeatures(2), linear_model.Ridge()),
    pipeline.make_pipeline(feature_selection.SelectKBest(k=2), linear_model.LogisticRegression()),
    pipeline.make_pipeline(preprocessing.Normalizer(), preprocessing.Binarizer(), linear_model.LogisticRegression()),
]


def shown(model: Any) -> str:
    steps = getattr(model, "steps", None)
    return "+".join(type(step[1]).__name__ for step in steps) if steps else type(model).__name__


@cache
def iris() -> tuple[np.ndarray, np.ndarray]:
    inputs, labels = load_iris(return_X_y=True)
    return inputs.astype(np.float32), labels


@pytest.mark.filterwarnings("ignore")  # of the converter about scikit-learn's newest release
@pytest.mark.parametrize("model", MODELS, ids=shown)
def test_scikit_learn_model_is_proven(model: Any):
    inputs, labels = iris()
    fitted = model.fit(inputs, labels)
    options = {id(fitted): {"zipmap": False}} if base.is_classifier(fitted) else None
    types = [("x", FloatTensorType([None, 4]))]
    converted = convert_sklearn(fitted, initial_types=types, options=options, target_opset=OPSETS)
    assert prove(converted, ["x"]) == Proof(True, "", "")
    running = load(converted)
    feeds = {"x": inputs[::40]}
    assert_independent(running, feeds, ["x"], run_alone(running, feeds, ["x"]))


def test_columns_of_several_kinds_are_proven():
    names, sizes = np.array([["a"], ["b"], ["c"], ["a"]], dtype=object), np.array([[1], [2], [3], [2]])
    numbers = np.array([[0.1, 5], [0.2, 4], [0.3, 3], [0.4, 2]], np.float32)
    table = np.concatenate([numbers.astype(object), sizes.astype(object), names], axis=1)
    columns = compose.ColumnTransformer(
        [
            ("numbers", preprocessing.StandardScaler(), [0, 1]),
            ("sizes", preprocessing.OneHotEncoder(), [2]),
            ("names", preprocessing.OneHotEncoder(), [3]),
        ]
    )
    fitted = pipeline.make_pipeline(columns, linear_model.LogisticRegression()).fit(table, [0, 1, 0, 1])
    types = [
        ("numbers", FloatTensorType([None, 2])),
        ("sizes", Int64TensorType([None, 1])),
        ("names", StringTensorType([None, 1])),
    ]
    options = {id(fitted): {"zipmap": False}}
    converted = convert_sklearn(fitted, initial_types=types, options=options, target_opset=OPSETS)
    feeds = {"numbers": numbers, "sizes": sizes, "names": names}
    assert prove(converted, list(feeds)) == Proof(True, "", "")
    running = load(converted)
    assert_independent(running, feeds, list(feeds), run_alone(running, feeds, list(feeds)))


def test_a_list_of_maps_is_not_proven():
    inputs, labels = iris()
    fitted = linear_model.LogisticRegression().fit(inputs, labels)
    converted = convert_sklearn(fitted, initial_types=[("x", FloatTensorType([None, 4]))], target_opset=OPSETS)
    found = prove(converted, ["x"])
    assert (found.proven, found.culprit) == (False, 'ZipMap (node "ZipMap")')


def test_words_are_counted_row_by_row():
    texts = ["one two three", "two three four", "one four four"]
    fitted = feature_extraction.text.CountVectorizer().fit(texts)
    converted = convert_sklearn(fitted, initial_types=[("x", StringTensorType([None, 1]))], target_opset=OPSETS)
    assert prove(converted, ["x"]).proven
    for node in converted.graph.node:
        if node.op_type == "StringNormalizer":
            node.attribute.append(onnx.helper.make_attribute("locale", "C.UTF-8"))  # slim images lack the default
    session = onnxruntime.InferenceSession(converted.SerializeToString())
    rows = np.array([*texts, "", "four four five", "  ", "näh one"], object)[:, None]
    together = session.run(None, {"x": rows})[0]
    # The split pads all rows to the longest of them, which must not count.
    alone = np.concatenate([session.run(None, {"x": rows[at : at + 1]})[0] for at in range(len(rows))])
    np.testing.assert_array_equal(together, alone)
