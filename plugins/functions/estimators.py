"""Makes a function of a pickled estimator: its library answers, in the process of the version.

file ─> joblib or pickle ─> what it takes: numbers, texts, or the columns of a table ─> predict, or transform
Outputs have the names that a conversion to ONNX gives them, so that callers stay when one becomes possible.
What it takes is found by trial: numbers of its columns first; a table of other columns takes documents, one a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from millstream.plugins.children.confined import ModelError

#: columns to try where an estimator does not say how many it takes
_SIZES = (1, 2, 3, 4, 8)
_FILLS = (0.5, 1.0, 0.0)


def served(path: Path) -> tuple[str, Callable[..., Any]]:
    """Return the name and the function of the estimator in a file. Raises ModelError, and what unpickling raises."""
    model = _loaded(path)
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    names = tuple(map(str, getattr(model, "feature_names_in_", ())))
    if not callable(getattr(model, "predict", None)) and not callable(getattr(model, "transform", None)):
        raise ModelError(f"the file has a {kind}, which neither predicts nor transforms: save the estimator itself")
    problem = ""
    for taken in _candidates(model, names):
        try:
            answers = _answers(model, taken)
        except Exception as error:
            problem = problem or f"{type(error).__name__}: {error}"
        else:
            return kind, _function(taken, answers)
    raise ModelError(f"{kind} answers neither numbers nor texts nor rows of a table: {problem}")


def _loaded(path: Path) -> Any:
    library: Any = import_module("joblib" if find_spec("joblib") else "pickle")
    try:
        if library.__name__ == "joblib":
            return library.load(path)
        with path.open("rb") as file:
            return library.load(file)
    except (AttributeError, ModuleNotFoundError) as error:
        raise ModelError(
            f"the pickle needs what is not here: {error}; push a folder with it, where service.py loads the pickle"
        ) from error


class _Taken(NamedTuple):
    """What an estimator takes.

    Args:
        trial: makes the values of as many rows.
        arguments: makes its argument of the values of rows.
        varies: the number of columns is that of each request.
    """

    hint: Any
    trial: Callable[[int], Any]
    arguments: Callable[[Any], Any]
    columns: tuple[str, ...] = ()
    varies: bool = False


class _Answer(NamedTuple):
    """An output: its name, and what answers it."""

    name: str
    of: Callable[[Any], Any]


def _candidates(model: Any, names: tuple[str, ...]) -> list[_Taken]:
    booster = _booster_columns(model)
    size = len(names) or getattr(model, "n_features_in_", None) or booster
    sizes = [(int(size), int(size))] if size else [(-1, tried) for tried in _SIZES]
    found = [_numbers(size, tried, fill, names, booster=booster > 0) for fill in _FILLS for size, tried in sizes]
    if names:
        return [*found, _Taken(list[dict[str, Any]], lambda rows: [dict.fromkeys(names)] * rows, _table(names))]
    texts = _Taken(list[str], lambda rows: ["a text"] * rows, lambda texts: texts)
    first = model
    while steps := getattr(first, "steps", None):
        first = steps[0][1]
    return [texts, *found] if hasattr(first, "build_analyzer") else [*found, texts]


def _booster_columns(model: Any) -> int:
    count = getattr(model, "num_features", None)  # of XGBoost's own Booster
    return int(count()) if callable(count) and hasattr(model, "save_config") else 0


def _numbers(size: int, tried: int, fill: float, names: tuple[str, ...], *, booster: bool) -> _Taken:
    """Return rows of `size` numbers (-1: any), of which `tried` are tried."""
    import numpy as np

    hint = Annotated[np.ndarray, np.float64, (-1, size)]
    arguments: Callable[[Any], Any] = _table(names) if names else (_matrix if booster else np.asarray)
    return _Taken(hint, lambda rows: np.full((rows, tried), fill), arguments, names, varies=size < 0)


def _matrix(values: Any) -> Any:
    import xgboost

    return xgboost.DMatrix(values)


def _table(names: tuple[str, ...]) -> Callable[[Any], Any]:
    import pandas as pd

    return lambda rows: pd.DataFrame(rows, columns=list(names))


def _answers(model: Any, taken: _Taken) -> list[tuple[_Answer, Any]]:
    """Return the outputs with their hints, once the estimator has answered. Raises what it raises."""
    document = taken.hint == list[dict[str, Any]]
    found: list[_Answer] = []
    if callable(getattr(model, "predict", None)):
        classifies = getattr(model, "classes_", None) is not None
        found.append(_Answer("label" if classifies else "variable", model.predict))
        if classifies and callable(getattr(model, "predict_proba", None)):
            found.append(_Answer("probabilities", model.predict_proba))
    else:
        found.append(_Answer("variable", model.transform))
    if document:  # no row can be made up
        return [(one, list[Any]) for one in found]
    results = [(one, dense(one.of(taken.arguments(taken.trial(2))))) for one in found]
    return [(one, hint_of(one.name, result, varies=taken.varies)) for one, result in results]


def dense(result: Any) -> Any:
    """Return an array of what an estimator answers: sparse matrices and tables, too."""
    import numpy as np

    if hasattr(result, "toarray"):
        return result.toarray()
    if isinstance(result, list):  # of a classifier of several outputs
        return np.stack([np.asarray(one) for one in result], axis=1)
    return result.to_numpy() if hasattr(result, "to_numpy") else np.asarray(result)


def hint_of(name: str, result: Any, *, varies: bool) -> Any:
    """Return the hint of what was answered for two rows; `varies`: so do its sizes. Raises ModelError."""
    import numpy as np

    if result.ndim == 0 or len(result) != 2:
        raise ModelError(f"it answers {name} of the shape {list(result.shape)} for two rows")
    if result.dtype.kind in "OUS":
        nested: Any = str
        for _ in range(result.ndim - 1):
            nested = list[nested]
        return list[nested]
    return Annotated[np.ndarray, result.dtype, (-1, *([-1] * (result.ndim - 1) if varies else result.shape[1:]))]


def _function(taken: _Taken, answers: Sequence[tuple[_Answer, Any]]) -> Callable[..., Any]:
    import numpy as np

    def plain(result: Any, hint: Any) -> Any:
        found = dense(result)
        if hint == list[Any]:
            return found.tolist()
        return found.astype(str).tolist() if found.dtype.kind in "OUS" else np.asarray(found)

    def predict(input: Any) -> Any:  # noqa: A002 - the name of the input
        argument = taken.arguments(input)
        return tuple(plain(answer.of(argument), hint) for answer, hint in answers)

    outputs: Any = NamedTuple("Answers", [(answer.name, hint) for answer, hint in answers])  # type: ignore[misc]
    predict.__annotations__ = {"input": taken.hint, "return": outputs}
    predict.columns = taken.columns  # type: ignore[attr-defined]
    return predict
