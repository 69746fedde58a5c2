"""Makes a function of a folder of MLflow: `mlflow.pyfunc` loads the model and answers.

MLmodel ─> load_model ─> its signature: tensors, or columns ─> predict(array, or table) ─> predictions
Columns of numbers are one tensor with their names; other columns, and models without a signature, take documents.
Source: MLflow, mlflow.pyfunc and mlflow.types: the types of columns, and what predict takes for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from millstream.plugins.children.confined import ModelError
from millstream.plugins.functions.estimators import dense, hint_of

#: types of columns of numbers -> numpy's
_NUMBERS = {"double": "float64", "float": "float32", "long": "int64", "integer": "int32", "boolean": "bool"}
_ROWS = 2  # of the trial that shows what is answered


def served(path: Path) -> tuple[str, Callable[..., Any]]:
    """Return the name and the function of a model. `path`: of the file MLmodel. Raises ModelError."""
    model = import_module("mlflow.pyfunc").load_model(str(path.parent))
    schema = getattr(model.metadata, "signature", None)
    inputs = [] if schema is None or schema.inputs is None else schema.inputs.to_dict()
    if inputs and all(one["type"] == "tensor" for one in inputs):
        return "MLflow", _of_tensors(model, inputs)
    if inputs and all(one.get("name") and one["type"] in _NUMBERS for one in inputs):
        return "MLflow", _of_numbers(model, inputs)
    return "MLflow", _of_documents(model, [one["name"] for one in inputs if one.get("name")])


def _of_tensors(model: Any, inputs: Sequence[Mapping[str, Any]]) -> Callable[..., Any]:
    """Return a function of arrays: one, or several by name."""
    import numpy as np

    named = {str(one.get("name") or "input"): one["tensor-spec"] for one in inputs}
    if len(named) > 1 or any(list(spec["shape"])[:1] != [-1] for spec in named.values()):
        raise ModelError("the MLflow model takes several tensors, or no rows: serve it by a function that calls it")
    ((name, spec),) = named.items()
    shape, dtype = tuple(spec["shape"]), np.dtype(spec["dtype"])
    trial = np.ones([_ROWS, *(max(size, 1) for size in shape[1:])]).astype(dtype)
    return _function(name, Annotated[np.ndarray, dtype, shape], model.predict, trial)


def _of_numbers(model: Any, inputs: Sequence[Mapping[str, Any]]) -> Callable[..., Any]:
    """Return a function of rows of numbers, which become the columns of a table in their types."""
    import numpy as np
    import pandas as pd

    types = {str(one["name"]): _NUMBERS[one["type"]] for one in inputs}

    def predict(values: Any) -> Any:
        return model.predict(pd.DataFrame(values, columns=list(types)).astype(types))

    hint = Annotated[np.ndarray, np.float64, (-1, len(types))]
    function = _function("input", hint, predict, np.ones((_ROWS, len(types))))
    function.columns = tuple(types)  # type: ignore[attr-defined]
    return function


def _of_documents(model: Any, columns: Sequence[str]) -> Callable[..., Any]:
    """Return a function of documents: objects are the rows of a table, other values a list."""
    import pandas as pd

    def predict(input: list[Any]) -> list[Any]:  # noqa: A002 - the name of the input
        table = bool(columns) or all(isinstance(row, dict) for row in input)
        return _rows(model.predict(pd.DataFrame(input, columns=list(columns) or None) if table else input), len(input))

    predict.__annotations__ = {"input": list[Any], "return": list[Any]}
    return predict


def _function(name: str, hint: Any, answer: Callable[[Any], Any], trial: Any) -> Callable[..., Any]:
    """Return a function of one array. What it answers is known once it has answered the trial; else documents."""
    import numpy as np

    try:
        outputs = hint_of("predictions", dense(answer(trial)), varies=False)
    except Exception:  # the numbers of the trial are none that it takes, or its answers are no rows of numbers
        outputs = list[Any]

    def predict(**given: Any) -> Any:
        (values,) = given.values()
        result = answer(values)
        if outputs == list[Any]:
            return _rows(result, len(values))
        found = dense(result)
        return found.astype(str).tolist() if found.dtype.kind in "OUS" else np.asarray(found)

    predict.__signature__ = _signature(name)  # type: ignore[attr-defined]
    predict.__annotations__ = {name: hint, "return": outputs}
    return predict


def _signature(name: str) -> Any:
    from inspect import Parameter, Signature

    return Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD)])


def _rows(result: Any, rows: int) -> list[Any]:
    """Return what is answered as a value for each row. Raises ModelError."""
    if hasattr(result, "to_dict") and hasattr(result, "columns"):
        result = result.to_dict("records")
    found = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(found, list) or len(found) != rows:
        raise ModelError(
            f"the model answered {type(result).__name__} for {rows} rows, and a value for each is expected"
        )
    return found
