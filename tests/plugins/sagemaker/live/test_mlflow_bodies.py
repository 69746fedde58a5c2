"""MLflow's bodies on /invocations, as its documentation gives them, through the running product."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.kit import models
from tests.kit.stack import Stack, assert_quiet, running_stack

X = np.arange(6, dtype=np.float32).reshape(3, 2)
DOUBLED = (2 * X).tolist()
WITHOUT_NAN = ("INT64", "BYTES", "BOOL")
A = np.arange(8, dtype=np.float32).reshape(2, 4)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("mlflow")
    settings = {"sagemaker_model": "m", "request_bytes_max": 8 << 20}
    with running_stack(folder, settings=settings) as stack:
        stack.push("m", models.scale(folder / "m.onnx"))
        stack.push("two", models.add_sub(folder / "two.onnx"))
        stack.push("lookup", models.lookup(folder / "lookup.onnx"))
        for datatype in WITHOUT_NAN:
            stack.push(datatype.lower(), models.identity(folder / f"{datatype}.onnx", datatype, ("N", 1)))
        yield stack


@pytest.fixture
def stack(served: Stack) -> Iterator[Stack]:
    yield served
    assert_quiet(served)


def invoke(stack: Stack, body: Any, model: str = "m") -> Any:
    reply = stack.http.post(
        "/invocations",
        content=body if isinstance(body, bytes) else json.dumps(body).encode(),
        headers={"Content-Type": "application/json", "X-Amzn-SageMaker-Target-Model": model},
    )
    return reply.json() if reply.status_code == 200 else (reply.status_code, reply.json()["error"])


@pytest.mark.parametrize(
    "body",
    [
        {"dataframe_split": {"index": [0, 1, 2], "columns": ["x1", "x2"], "data": X.tolist()}},
        {"dataframe_split": {"columns": ["x1", "x2"], "data": X.tolist()}, "params": {}},
        {"instances": X.tolist(), "params": None},
        {"dataframe_split": {"columns": [0, 1], "data": X.tolist()}},
        {"dataframe_split": {"data": X.tolist()}},
        {"dataframe_split": {"columns": ["x"], "data": [[row] for row in X.tolist()]}},
        {"dataframe_records": [{"x1": row[0], "x2": row[1]} for row in X.tolist()]},
        {"dataframe_records": [{"x": row} for row in X.tolist()]},
        {"instances": X.tolist()},
        {"instances": [{"x": row} for row in X.tolist()]},
    ],
)
def test_a_body_of_mlflow_is_answered_with_predictions(stack: Stack, body: Any) -> None:
    assert invoke(stack, body) == {"predictions": DOUBLED}


@pytest.mark.parametrize("body", [{"inputs": X.tolist()}, {"inputs": {"x": X.tolist()}}])
def test_inputs_are_answered_for_mlflow_and_for_sagemaker(stack: Stack, body: Any) -> None:
    assert invoke(stack, body) == {"predictions": DOUBLED, "outputs": DOUBLED}


def test_several_inputs_are_columns_and_several_outputs_are_records(stack: Stack) -> None:
    rows = [{"a": one, "b": one} for one in A.tolist()]
    expected = [{"sum": [2 * v for v in one], "difference": [0.0] * 4} for one in A.tolist()]
    assert invoke(stack, {"dataframe_records": rows}, "two") == {"predictions": expected}
    split = {"columns": ["b", "a"], "data": [[one, one] for one in A.tolist()]}
    assert invoke(stack, {"dataframe_split": split}, "two") == {"predictions": expected}


def test_a_null_of_pandas_is_nan(stack: Stack) -> None:
    reply = stack.http.post(
        "/invocations",
        json={"dataframe_split": {"columns": ["p", "q"], "data": [[None, 1.0]]}},
        headers={"Content-Type": "application/json"},
    )
    assert reply.status_code == 200
    (row,) = json.loads(reply.text)["predictions"]
    assert (np.isnan(row[0]), row[1]) == (True, 2.0)


@pytest.mark.parametrize("names", [["p", "q"], ["x"]])
def test_a_long_dataframe(stack: Stack, names: list[str]) -> None:
    """Long lists of numbers are parsed in pieces."""
    rows = 60
    wide = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2) + 0.123456
    padded = [[float(f"{v:.6f}") for v in row] for row in wide.tolist()]
    data = padded if len(names) == 2 else [[row] for row in padded]
    body = json.dumps({"dataframe_split": {"columns": names, "data": data}}).replace(", ", "," + " " * 1000)
    assert len(body) > 100_000
    np.testing.assert_allclose(invoke(stack, body.encode())["predictions"], 2 * wide, rtol=1e-5)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"dataframe_split": []}, "'dataframe_split' is an object with 'columns' and 'data'"),
        ({"dataframe_split": {"columns": ["p", "q"]}}, "'dataframe_split' is an object with 'columns' and 'data'"),
        ({"dataframe_split": {"columns": "pq", "data": [[1, 2]]}}, "'columns' of 'dataframe_split' is a list of names"),
        (
            {"dataframe_split": {"columns": ["p", "p"], "data": [[1, 2]]}},
            "a column of 'dataframe_split' is there twice",
        ),
        (
            {"dataframe_split": {"columns": ["p", "q"], "data": [[1, 2], [1]]}},
            "line 1 of 'dataframe_split' has 1 values for 2 columns",
        ),
        ({"dataframe_split": {"columns": ["p"], "data": [1]}}, "line 0 of 'dataframe_split' is a list of values"),
        ({"dataframe_split": {"columns": [], "data": []}}, "the DataFrame has no columns"),
        ({"dataframe_split": {"columns": ["p", "q"], "data": 7}}, "'data' of 'dataframe_split' is a list of lines"),
        ({"dataframe_records": []}, "'dataframe_records' is a list of objects {column: value}, and not empty"),
        ({"dataframe_records": [1]}, "'dataframe_records' is a list of objects {column: value}, and not empty"),
        (
            {"dataframe_records": [{"p": 1, "q": 2}, {"p": 1}]},
            "record 1 of 'dataframe_records' has other columns than record 0",
        ),
        (
            {"dataframe_records": [{"p": 1, "q": 2}], "inputs": [[1, 2]]},
            "give one of dataframe_split, dataframe_records, instances and inputs, not dataframe_records and inputs",
        ),
    ],
)
def test_a_wrong_dataframe_is_refused_with_what_is_wrong(stack: Stack, body: Any, error: str) -> None:
    assert invoke(stack, body) == (400, error)


@pytest.mark.parametrize(
    "body",
    [{"dataframe_split": {"data": X.tolist()}}, {"instances": X.tolist()}, {"inputs": X.tolist()}],
)
def test_params_are_refused_and_not_dropped(stack: Stack, body: Any) -> None:
    expected = "the model takes no params (temperature, top_k): leave them out of the body"
    assert invoke(stack, {**body, "params": {"temperature": 0.5, "top_k": 3}}) == (400, expected)
    assert invoke(stack, {**body, "params": [1]}) == (400, expected.replace("temperature, top_k", "no object"))


def test_a_null_is_refused_in_columns_without_nan(stack: Stack) -> None:
    """MLflow refuses them, too: integer columns cannot represent missing values."""
    for datatype in WITHOUT_NAN:
        model = datatype.lower()
        body = {"dataframe_split": {"columns": ["x"], "data": [[None]]}}
        status, error = invoke(stack, body, model)
        assert (status, "null" in error) == (400, True), error


def test_columns_that_do_not_fit_the_model_are_named(stack: Stack) -> None:
    status, error = invoke(stack, {"dataframe_split": {"columns": ["p", "q", "r"], "data": [[1, 2, 3]]}})
    assert (status, "[-1,2]" in error) == (400, True)
    status, error = invoke(stack, {"dataframe_split": {"columns": ["p", "q"], "data": [["a", 2]]}})
    assert status == 400
    status, error = invoke(stack, {"dataframe_records": [{"a": 1, "c": 2}]}, "two")
    assert (status, error) == (400, "column 'c' is no input of the model: its inputs are a, b")
    status, error = invoke(stack, {"dataframe_records": [{"x" * 100_000: 1}]}, "two")
    assert (status, len(error) < 1000) == (400, True)
