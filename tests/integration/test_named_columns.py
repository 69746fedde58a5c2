"""Tables whose columns have names, through the running product in every protocol that sends names."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import skl2onnx
from skl2onnx.common.data_types import FloatTensorType
from sklearn.compose import ColumnTransformer
from sklearn.datasets import load_iris
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from millstream.client.client import Client
from tests.kit import pickles
from tests.kit.mlflow_folders import column_signature, mlflow_folder
from tests.kit.stack import Stack
from tests.kit.tables import WAYS, Table

X, Y = load_iris(return_X_y=True)
LABELS = load_iris().target_names[Y]
#: the name of the model's own input, Unicode, a number, and a name that two others begin with
NAMES = ["input", "Länge (µm)", "7", "input_2"]
ROWS = X[::40].astype(np.float32)
TABLE = {name: ROWS[:, at].tolist() for at, name in enumerate(NAMES)}


SCALED = make_pipeline(StandardScaler(), LogisticRegression(max_iter=500)).fit(X, LABELS)
PROBABILITIES, PREDICTED = SCALED.predict_proba(ROWS), SCALED.predict(ROWS).tolist()
SCALED.steps[0][1].feature_names_in_ = np.array(NAMES, object)  # as after a fit with a DataFrame: pandas is not here
COLUMNS = ["a", "b", "c", "d"]
PICKED = make_pipeline(ColumnTransformer([("all", StandardScaler(), [0, 1, 2, 3])]), LogisticRegression(max_iter=500))
PICKED.fit(X, LABELS)


def of_columns(folder: Path) -> Path:
    """Write a model with an input for each column, as skl2onnx makes it of a table, and return its folder."""
    converted = skl2onnx.to_onnx(
        PICKED,
        initial_types=[(name, FloatTensorType([None, 1])) for name in COLUMNS],
        options={"zipmap": False},
        target_opset={"": 18, "ai.onnx.ml": 3},
    )
    flavours = {"onnx": {"onnx_version": "1.20.0", "data": "model.onnx"}}
    files = {"model.onnx": converted.SerializeToString()}
    return mlflow_folder(folder, flavours, files, column_signature(COLUMNS))


@pytest.fixture(scope="module", autouse=True)
def _served(shared_stack: Stack, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("models")
    with Client(shared_stack.url, key=shared_stack.key) as client:
        (folder / "one").write_bytes(pickles.dumped(SCALED))
        client.push("table-whole", folder / "one", allow_pickle=True, wait_s=300)
        client.push("table-each", of_columns(folder / "each"), wait_s=300)


def turned(table: Table) -> Table:
    return {name: table[name] for name in reversed(list(table))}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("model", "names"), [("table-whole", NAMES), ("table-each", COLUMNS)], ids=["one", "each"])
def test_columns_are_matched_by_name(stack: Stack, way: str, model: str, names: list[str]) -> None:
    send = WAYS[way]
    table = dict(zip(names, TABLE.values(), strict=True))
    for given in (table, turned(table)):
        answered = send(stack, model, given, "probabilities")
        assert not isinstance(answered, str), answered
        np.testing.assert_allclose(answered, PROBABILITIES, rtol=1e-3, atol=1e-5)
        assert send(stack, model, given, "label").ravel().tolist() == PREDICTED
    many = {name: values * 40 for name, values in table.items()}  # more rows than a run takes
    answered = send(stack, model, turned(many), "probabilities")
    np.testing.assert_allclose(answered, np.tile(PROBABILITIES, (40, 1)), rtol=1e-3, atol=1e-5)
    last = names[-1]
    few = {name: values for name, values in table.items() if name != last}
    for wrong, says in (
        ({**table, "Unnamed: 0": [0, 1, 2, 3]}, ("'Unnamed: 0'", "unknown")),
        ({**few, last.upper() + "x": table[last]}, (last.upper() + "x", f"did you mean '{last}'")),
        (few, (f"column '{last}' is missing",)),
        ({**table, names[1]: ["x", "y", "z", "q"]}, (f"'{names[1]}'",)),
    ):
        refused = send(stack, model, wrong, "label")
        assert isinstance(refused, str) and refused.startswith("400 "), refused
        assert all(word in refused for word in says), refused
