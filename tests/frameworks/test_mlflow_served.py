"""Folders of MLflow that no importer converts are served by MLflow, if it is installed where these tests run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from millstream.client.client import Client
from millstream.services.errors import Failure
from tests.kit.stack import Stack

mlflow = pytest.importorskip("mlflow")
pytestmark = [pytest.mark.frameworks, pytest.mark.filterwarnings("ignore")]
TABLE = pd.DataFrame({"a": [1.0, 2.0], "b": [3, 4]})


def saved(folder: Path, predict: Any, example: pd.DataFrame | None) -> Path:
    """Save a model of MLflow that runs with the packages that are here."""

    class Model(mlflow.pyfunc.PythonModel):  # type: ignore[misc, name-defined]
        def predict(self, context: Any, model_input: Any, params: Any = None) -> Any:
            return predict(model_input)

    signature = None if example is None else mlflow.models.infer_signature(example, predict(example))
    mlflow.pyfunc.save_model(str(folder), python_model=Model(), signature=signature, pip_requirements=["mlflow"])
    (folder / "requirements.txt").write_text("")
    return folder


def test_a_model_of_numbers_takes_tables_by_their_names(stack: Stack, tmp_path: Path) -> None:
    folder = saved(tmp_path / "model", lambda table: table["a"] * 2 + table["b"], TABLE)
    with Client(stack.url, key=stack.key) as client:
        with pytest.raises(Failure, match="push it with --allow-code"):
            client.push("sums", folder)
        client.push("sums", folder, allow_code=True, wait_s=120)
        np.testing.assert_array_equal(client.predict("sums", TABLE)["output"], [5.0, 8.0])
    split = {"dataframe_split": {"columns": ["b", "a"], "data": [[3, 1.0]]}}
    answered = stack.http.post("/endpoints/sums/invocations", json=split).raise_for_status().json()
    assert answered == {"predictions": [5.0]}


def test_a_model_of_other_columns_takes_documents(stack: Stack, tmp_path: Path) -> None:
    example = pd.DataFrame({"city": ["Rome"], "calls": [3]})
    folder = saved(tmp_path / "model", lambda table: (table["city"] * table["calls"]).tolist(), example)
    with Client(stack.url, key=stack.key) as client:
        client.push("cities", folder, allow_code=True, wait_s=120)
    body = {"instances": [{"input": {"city": "Rome", "calls": 2}}, {"input": {"city": "Bari", "calls": 1}}]}
    answered = stack.http.post("/v1/models/cities:predict", json=body).raise_for_status().json()
    assert answered == {"predictions": ["RomeRome", "Bari"]}
