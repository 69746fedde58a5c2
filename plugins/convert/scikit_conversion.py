"""Converts a fitted estimator of scikit-learn to ONNX, and runs it for the samples.

estimator ─> inputs (convert.scikit_inputs) ─> skl2onnx, without ZipMap ─> imported/model.onnx
          └> predict, predict_proba, … on drawn rows ─> the expected value of each output
"""

from __future__ import annotations

import copy
import importlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from millstream.plugins.convert.base import Imported
from millstream.plugins.convert.scikit_inputs import (
    INPUT,
    MISSING,
    EstimatorInputs,
    draw,
    imputes_text,
    inputs_of,
    is_missing,
)
from millstream.services.errors import invalid
from millstream.services.ingest.importers import IMPORTED, Sample
from millstream.services.ingest.mending import mend
from millstream.services.model.names import FILE
from millstream.services.process.threads import NICE

Array = np.ndarray[Any, Any]

#: opsets that skl2onnx's converters write
_OPSETS = {"": 18, "ai.onnx.ml": 3}
#: what the second output of a classifier or clusterer is, the first that the estimator has
_SCORES = ("predict_proba", "decision_function", "transform", "score_samples")
#: rows whose two best scores are closer to each other than this are no sample: rounding may decide their label
_TIE = 1e-3
_CAUSE_CHARACTERS_MAX = 300
#: what remains to the owner of a model that has no form in ONNX
NO_CONVERTER = (
    "rebuild that step with an estimator that it knows (https://onnx.ai/sklearn-onnx/supported.html), or export the "
    "model to ONNX where it was made, with a converter of your own, and push that file"
)
_BOOSTED = {"XGBModel": "XGBoost", "LGBMModel": "LightGBM", "CatBoost": "CatBoost"}


def load_scikit_learn() -> None:
    """Load scikit-learn and its converter, in the process that imports are forked from."""
    os.nice(NICE)
    for module in ("sklearn.ensemble", "sklearn.pipeline", "skl2onnx", "onnxmltools", "pandas"):
        with suppress(ImportError):  # the import that needs it says what to install
            importlib.import_module(module)


def check_state(state: Any) -> None:
    """Raise Failure(INVALID) for the state of an estimator that a newer scikit-learn than is here saved."""
    import sklearn

    written_by = state.get("_sklearn_version") if isinstance(state, dict) else None
    if isinstance(written_by, str) and _release(written_by) > _release(sklearn.__version__):
        raise invalid(
            f"the model was saved by scikit-learn {written_by[:40]}, and the gateway has {sklearn.__version__}, which "
            f"cannot be trusted to read it: pip install 'scikit-learn>={written_by[:40]}' where the gateway runs"
        )


def convert_estimator(model: Any, folder: Path) -> Imported:
    """Convert a fitted estimator and return it with samples. Raises Failure(INVALID)."""
    kind = next((name for base in type(model).mro() if (name := _BOOSTED.get(base.__name__))), None)
    if kind is not None:
        from millstream.plugins.convert.boosted_conversion import convert_boosted

        return convert_boosted(kind, model, folder)
    if not (hasattr(model, "predict") or hasattr(model, "transform")):
        raise invalid(
            f"the file has a {type(model).__module__}.{type(model).__qualname__}, which neither predicts nor "
            "transforms: save the estimator itself"
        )
    inputs = inputs_of(model)
    onnx_model = _to_onnx(_prepared(model), inputs)
    _drop_votes(model, onnx_model)
    used = _used(onnx_model, [name for name, _ in _initial_types(inputs)])
    _name_inputs(onnx_model, used)
    mend(onnx_model)  # classifiers of several outputs answer lists
    sample, notes = _sample(model, inputs, onnx_model)
    path = folder / IMPORTED / FILE
    path.write_bytes(onnx_model.SerializeToString())
    given = {name: values for name, values in sample.inputs.items() if name in used}
    return Imported(
        path,
        "onnx",
        [Sample(given, sample.outputs)],
        _producer(),
        notes=[*notes, *_notes_of_encoders(model)],
        columns=inputs.named,
        categories=inputs.categories if inputs.named else {},
    )


def _notes_of_encoders(model: Any) -> list[str]:
    """Return a note if numbers that scikit-learn refuses are encoded: only texts are looked up before a run."""
    for part in _all_parts(model):
        if type(part).__name__ != "OrdinalEncoder" or part.handle_unknown != "error":
            continue
        known = getattr(part, "categories_", ())
        if any(not any(isinstance(value, str) for value in values.tolist()) for values in known):
            return ["Numbers that an OrdinalEncoder was not fitted with are -1 here; scikit-learn refuses them."]
    return []


def _used(onnx_model: Any, names: list[str]) -> list[str]:
    """Remove the inputs of columns that no step takes, and return the names of the others. `names`: of all."""
    graph = onnx_model.graph
    if len(graph.input) != len(names):
        raise AssertionError(f"skl2onnx made {len(graph.input)} inputs of {len(names)}")
    taken = {name for node in graph.node for name in node.input}
    pairs = list(zip(graph.input, names, strict=True))
    for given, _ in pairs:
        if given.name not in taken:
            graph.input.remove(given)
    return [name for given, name in pairs if given.name in taken]


def _prepared(model: Any) -> Any:
    """Return a copy of an estimator that skl2onnx converts: texts that are missing are empty ones there."""
    copied = copy.deepcopy(model)
    for part in _all_parts(copied):
        if imputes_text(part):
            part.missing_values = MISSING
        elif type(part).__name__ == "OneHotEncoder" and hasattr(part, "categories_"):
            part.categories_ = [_without_nan(known) for known in part.categories_]
        elif type(part).__name__ == "VotingClassifier":
            part.flatten_transform = False  # of `transform`, which is not converted
    return copied


def _without_nan(known: Array) -> Array:
    """Return the categories of a column of text with MISSING in place of NaN."""
    if not any(isinstance(value, str) for value in known.tolist()):
        return known
    return np.array([MISSING if is_missing(value) else value for value in known.tolist()], object)


def _all_parts(model: Any) -> Iterator[Any]:
    """Yield an estimator and all estimators that it holds, in lists and dictionaries, too."""
    seen: set[int] = set()
    left = [model]
    while left:
        part = left.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        if hasattr(part, "get_params"):
            yield part
            left += vars(part).values()
        elif isinstance(part, list | tuple):
            left += [one for one in part if isinstance(one, list | tuple | dict) or hasattr(one, "get_params")]
        elif isinstance(part, dict):
            left += part.values()


def _producer() -> str:
    import skl2onnx
    import sklearn

    return f"scikit-learn {sklearn.__version__}, skl2onnx {skl2onnx.__version__}"


def _release(version: str) -> tuple[int, ...]:
    """Return major and minor number; (0, 0) if unknown."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _to_onnx(model: Any, inputs: EstimatorInputs) -> Any:
    import skl2onnx
    from skl2onnx.common.exceptions import MissingConverter, MissingShapeCalculator

    _register_boosted()
    types = _initial_types(inputs)
    try:
        for options in ({"zipmap": False}, None):
            try:
                return skl2onnx.to_onnx(model, initial_types=types, options=options, target_opset=_OPSETS)
            except NameError as error:  # the estimator has no such option
                if options is None or "zipmap" not in str(error):
                    raise
    except (MissingShapeCalculator, MissingConverter) as error:
        match = re.search(r"type '(?:<class ')?([\w.]+)", str(error))
        what = match[1] if match else type(model).__name__
        raise invalid(f"skl2onnx cannot convert {what}; {NO_CONVERTER}") from error
    except MemoryError:
        raise
    except Exception as error:  # of any kind: its converters expect more than they check
        cause = " ".join(str(error).split())[:_CAUSE_CHARACTERS_MAX]
        raise invalid(
            f"skl2onnx {skl2onnx.__version__} cannot convert this {type(model).__name__} "
            f"({type(error).__name__}: {cause}); {NO_CONVERTER}"
        ) from error
    raise AssertionError


def _name_inputs(onnx_model: Any, names: list[str]) -> None:
    """Give the inputs the names of the columns: skl2onnx makes "a_b" of "a b", and keeps their order."""
    from onnx import helper

    graph = onnx_model.graph
    renamed = [(given, name) for given, name in zip(graph.input, names, strict=True) if given.name != name]
    for at, (given, name) in enumerate(renamed):
        graph.node.insert(at, helper.make_node("Identity", [name], [given.name]))
        given.name = name


def _initial_types(inputs: EstimatorInputs) -> list[tuple[str, Any]]:
    from skl2onnx.common.data_types import FloatTensorType, StringTensorType

    if inputs.table:
        return [
            (column.name, (StringTensorType if column.text else FloatTensorType)([None, 1]))
            for column in inputs.columns
        ]
    if inputs.columns[0].name == INPUT and inputs.text:
        return [(INPUT, StringTensorType([None, 1]))]
    kind = StringTensorType if inputs.text else FloatTensorType
    return [(INPUT, kind([None, len(inputs.columns)]))]


def _register_boosted() -> None:
    """Teach skl2onnx the boosted trees that a pipeline may contain, as far as they are installed."""
    from skl2onnx import update_registered_converter
    from skl2onnx.common.shape_calculator import (
        calculate_linear_classifier_output_shapes,
        calculate_linear_regressor_output_shapes,
    )

    options = {"nocl": [True, False], "zipmap": [True, False, "columns"]}
    with suppress(ImportError):
        from onnxmltools.convert.xgboost.operator_converters.XGBoost import convert_xgboost
        from xgboost import XGBClassifier, XGBRegressor

        classifier, regressor = calculate_linear_classifier_output_shapes, calculate_linear_regressor_output_shapes
        update_registered_converter(XGBClassifier, "XGBClassifier", classifier, convert_xgboost, options=options)
        update_registered_converter(XGBRegressor, "XGBRegressor", regressor, convert_xgboost)
    with suppress(ImportError):
        from lightgbm import LGBMClassifier, LGBMRegressor
        from onnxmltools.convert.lightgbm.operator_converters.LightGbm import convert_lightgbm

        classifier, regressor = calculate_linear_classifier_output_shapes, calculate_linear_regressor_output_shapes
        update_registered_converter(LGBMClassifier, "LgbmClassifier", classifier, convert_lightgbm, options=options)
        update_registered_converter(LGBMRegressor, "LgbmRegressor", regressor, convert_lightgbm)


def _sample(model: Any, inputs: EstimatorInputs, onnx_model: Any) -> tuple[Sample, list[str]]:
    columns = draw(inputs)
    fed = _fed(inputs, columns)
    answers = {output.name: _answer(model, at, fed) for at, output in enumerate(onnx_model.graph.output)}
    _keep_booleans(onnx_model, answers)
    clear = _clear_rows(model, [answer for answer in answers.values() if answer is not None])
    outputs = {}
    for output in onnx_model.graph.output:
        answer = answers[output.name]
        if answer is not None:
            outputs[output.name] = _shaped(answer[clear], len(output.type.tensor_type.shape.dim))
    notes = [f"Output {name!r} was not compared with scikit-learn." for name in answers if answers[name] is None]
    return Sample(_named(inputs, [column[clear] for column in columns]), outputs), notes


def _drop_votes(model: Any, onnx_model: Any) -> None:
    """Remove the scores of a classifier that has none itself, such as one that counts votes."""
    is_classifier = hasattr(model, "classes_") and hasattr(model, "predict")
    if is_classifier and not any(hasattr(model, name) for name in _SCORES[:2]):
        del onnx_model.graph.output[1:]


def _keep_booleans(onnx_model: Any, answers: Mapping[str, Array | None]) -> None:
    """Give labels that are booleans in scikit-learn back as such: skl2onnx makes integers of them."""
    from onnx import TensorProto, helper

    graph = onnx_model.graph
    for output in graph.output:
        answer = answers[output.name]
        if answer is None or answer.dtype != np.bool_ or output.type.tensor_type.elem_type != TensorProto.INT64:
            continue
        integers = f"{output.name}_integers"
        for node in graph.node:
            node.output[:] = [integers if name == output.name else name for name in node.output]
            node.input[:] = [integers if name == output.name else name for name in node.input]
        graph.node.append(helper.make_node("Cast", [integers], [output.name], to=TensorProto.BOOL))
        output.type.tensor_type.elem_type = TensorProto.BOOL


def _fed(inputs: EstimatorInputs, columns: list[Array]) -> Any:
    """Return what the estimator is called with: a table where it was fitted with one, else an array."""
    columns = [
        np.where(values == MISSING, np.nan, values) if column.missing else values
        for column, values in zip(inputs.columns, columns, strict=True)
    ]
    if inputs.table:
        import pandas as pd

        return pd.DataFrame({column.name: values for column, values in zip(inputs.columns, columns, strict=True)})
    if inputs.columns[0].name == INPUT and inputs.text:
        return columns[0].tolist()
    return np.stack(columns, axis=1)


def _named(inputs: EstimatorInputs, columns: list[Array]) -> dict[str, Array]:
    if inputs.table:
        pairs = zip(inputs.columns, columns, strict=True)
        return {column.name: values.reshape(-1, 1) for column, values in pairs}
    return {INPUT: np.stack(columns, axis=1)}


def _answer(model: Any, at: int, fed: Any) -> Array | None:
    """Return what the estimator answers for output number `at` of the converted model; None if that is not known."""
    names = ("predict", "transform") if at == 0 else _SCORES
    for name in names:
        function = getattr(model, name, None)
        if function is not None:
            answer = _called(function, fed)
            if isinstance(answer, list) and 0 < at <= len(answer):  # the scores of each of several outputs
                answer = answer[at - 1]
            elif at > 1:
                return None
            return np.asarray(answer.toarray() if hasattr(answer, "toarray") else answer)
    return None


def _called(function: Any, fed: Any) -> Any:
    """Return what the function answers: some estimators take only the datatype with which they were fitted."""
    if not isinstance(fed, np.ndarray) or fed.dtype.kind != "f":
        return function(fed)
    try:
        return function(fed.astype(np.float64))
    except ValueError:
        return function(fed)


def _clear_rows(model: Any, answers: list[Array]) -> Array:
    """Return the positions of the rows whose label rounding cannot change; all rows if there is no such row."""
    rows = len(answers[0])
    clear = np.ones(rows, bool)
    for scores in (answer.reshape(rows, -1) for answer in answers[1:]):
        if scores.shape[1] == 1:
            clear &= np.abs(scores[:, 0]) > _TIE
        else:  # the best is the largest score of a classifier, and the smallest distance of a clusterer
            ordered = np.sort(scores, axis=1)
            nearest = not hasattr(model, "classes_") and not hasattr(model, "predict_proba")
            clear &= (ordered[:, 1] - ordered[:, 0] if nearest else ordered[:, -1] - ordered[:, -2]) > _TIE
    return np.flatnonzero(clear) if clear.any() else np.arange(rows)


def _shaped(answer: Array, rank: int) -> Array:
    """Return the answer with the rank that the converted model's output has: (rows,) or (rows, 1)."""
    if rank == 1 and answer.ndim == 2 and answer.shape[1] == 1:
        return answer[:, 0]
    return answer.reshape(-1, 1) if rank == 2 and answer.ndim == 1 else answer
