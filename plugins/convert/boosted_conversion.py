"""Converts boosted trees to ONNX, and runs them in their library for the samples.

XGBoost, LightGBM ─> onnxmltools ┐
CatBoost ─> its own exporter     ┴> without ZipMap, shapes as they are ─> imported/model.onnx
Columns and their categories are in the libraries' files. A value without a category: XGBoost refuses it, LightGBM takes
it for a missing one. Rows for the samples are drawn from the thresholds of the trees; some values are missing (NaN).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from millstream.plugins.convert.base import SCRATCH, Imported
from millstream.services.errors import invalid
from millstream.services.ingest.importers import IMPORTED, Sample
from millstream.services.model.manifest import ColumnCategories
from millstream.services.model.names import FILE

Array = np.ndarray[Any, Any]

ROWS = 64
_SEED = 20
_TIE = 1e-4
_INPUT = "input"
_COLUMNS_MAX = 1 << 20
_FEATURES = re.compile(r"(?m)^\[categorical_feature: ([\d,]*)\]")
_INFOS = re.compile(r"(?m)^feature_infos=(.*)$")
#: nothing is known of the categories: a request by name is refused
_UNKNOWN = ColumnCategories(coded=True, unseen="refused")


class Columns(NamedTuple):
    """The columns of a model.

    Args:
        width: how many it takes.
        names: in its order; empty: the library made them up.
        categories: by name.
        coded: positions of the columns that hold codes of categories.
    """

    width: int
    names: Sequence[str] = ()
    categories: Mapping[str, ColumnCategories] = {}
    coded: frozenset[int] = frozenset()


class _Converted(NamedTuple):
    """A model in ONNX.

    Args:
        graph: the ONNX model.
        columns: what it takes.
        classes: the labels, in the order of the probabilities; None for a regression.
        versions: of the library and the converter.
    """

    graph: Any
    columns: Columns
    classes: Array | None
    versions: str


def convert_boosted(kind: str, model: Any, folder: Path) -> Imported:
    """Convert a model of XGBoost, LightGBM or CatBoost, named by `kind`. Raises Failure(INVALID)."""
    if kind == "CatBoost":
        converted = _catboost(model, folder / SCRATCH / "catboost.onnx")
    else:
        converted = _xgboost(model) if kind == "XGBoost" else _lightgbm(model)
    _mend_shapes(converted.graph)
    path = folder / IMPORTED / FILE
    path.write_bytes(converted.graph.SerializeToString())
    sample = _sample(kind, model, converted)
    columns = converted.columns
    return Imported(path, "onnx", [sample], converted.versions, columns=columns.names, categories=columns.categories)


def _xgboost(model: Any) -> _Converted:
    import onnxmltools
    import xgboost
    from onnxmltools.convert.common.data_types import FloatTensorType

    booster = _booster(model)
    learner = json.loads(booster.save_config())["learner"]
    kind, objective = learner["learner_train_param"]["booster"], learner["objective"]["name"]
    if kind != "gbtree":
        raise invalid(
            f"onnxmltools converts XGBoost's trees (booster gbtree), and this is a {kind}: train one of trees"
        )
    columns = _checked(xgboost_columns(booster))
    classes = max(int(learner["learner_model_param"]["num_class"]), 2)
    copied = booster.copy()
    copied.feature_names = None
    if booster.feature_types:  # the dump that onnxmltools reads leaves out thresholds of booleans ("i")
        copied.feature_types = [kind if kind == "c" else "float" for kind in booster.feature_types]
    if objective.startswith("rank:"):  # its answer is the sum of its trees
        copied.set_param({"objective": "reg:squarederror"})
    graph = onnxmltools.convert_xgboost(copied, initial_types=[(_INPUT, FloatTensorType([None, columns.width]))])
    labels = np.arange(classes) if objective.startswith(("binary:", "multi:")) else None
    return _Converted(graph, columns, labels, f"XGBoost {xgboost.__version__}, onnxmltools {onnxmltools.__version__}")


def _lightgbm(model: Any) -> _Converted:
    import lightgbm
    import onnxmltools
    from onnxmltools.convert.common.data_types import FloatTensorType

    booster = getattr(model, "booster_", model)
    columns = _checked(lightgbm_columns(booster))
    types = [(_INPUT, FloatTensorType([None, columns.width]))]
    graph = onnxmltools.convert_lightgbm(model, initial_types=types)
    labels = getattr(model, "classes_", None)
    if labels is None and len(graph.graph.output) > 1:
        labels = np.arange(max(booster.num_model_per_iteration(), 2))
    versions = f"LightGBM {lightgbm.__version__}, onnxmltools {onnxmltools.__version__}"
    return _Converted(graph, columns, labels, versions)


def _catboost(model: Any, path: Path) -> _Converted:
    import catboost
    import onnx

    categorical = model.get_cat_feature_indices()
    if len(categorical) or len(model.get_text_feature_indices()):
        raise invalid("the CatBoost model has categorical or text columns, which ONNX has not: encode them as numbers")
    columns = _checked(catboost_columns(model))
    try:
        model.save_model(str(path), format="onnx")
    except catboost.CatBoostError as error:
        cause = " ".join(str(error).split())[:300]
        raise invalid(f"CatBoost's exporter to ONNX refuses the model: {cause}") from error
    graph = onnx.load(path)
    labels = np.asarray(model.classes_) if len(graph.graph.output) > 1 else None
    return _Converted(graph, columns, labels, f"CatBoost {catboost.__version__}")


def _booster(model: Any) -> Any:
    """Return the Booster of a model of XGBoost, also of its classes for scikit-learn."""
    return model.get_booster() if hasattr(model, "get_booster") else model


def _checked(columns: Columns) -> Columns:
    if not 1 <= columns.width <= _COLUMNS_MAX:
        raise invalid(f"the model takes {columns.width} columns: from 1 to {_COLUMNS_MAX} can be served")
    return columns


def _mend_shapes(model: Any) -> None:
    """Declare the shapes that trees have: labels (rows,), of a regression (rows, targets)."""
    from onnx import TensorProto

    regression = len(model.graph.output) == 1
    for output in model.graph.output:
        tensor = output.type.tensor_type
        if tensor.elem_type in {TensorProto.INT64, TensorProto.STRING} or regression:
            dims = [None, 1] if regression else [None]
            del tensor.shape.dim[:]
            for dim in dims:
                added = tensor.shape.dim.add()
                if dim is not None:
                    added.dim_value = dim


def _sample(kind: str, model: Any, converted: _Converted) -> Sample:
    rows = _draw(converted.graph, converted.columns)
    scores = _scores(kind, model, rows, converted.classes)
    outputs = [output.name for output in converted.graph.graph.output]
    name = converted.graph.graph.input[0].name
    if converted.classes is None:
        return Sample({name: rows}, {outputs[0]: scores.reshape(len(rows), -1).astype(np.float32)})
    ordered = np.sort(scores, axis=1)
    clear = np.flatnonzero(ordered[:, -1] - ordered[:, -2] > _TIE)
    clear = clear if len(clear) else np.arange(len(rows))
    labels = converted.classes[scores.argmax(axis=1)]
    return Sample({name: rows[clear]}, {outputs[0]: labels[clear], outputs[1]: scores[clear].astype(np.float32)})


def _scores(kind: str, model: Any, rows: Array, classes: Array | None) -> Array:
    """Return the library's probabilities (rows, classes), or the answers of a regression."""
    if kind == "CatBoost":
        return np.asarray(
            model.predict(rows, prediction_type="Probability") if classes is not None else model.predict(rows)
        )
    if kind == "LightGBM":
        scores = np.asarray(getattr(model, "booster_", model).predict(rows))
    else:
        scores = _xgboost_scores(_booster(model), rows, classes)
    if classes is not None and scores.ndim == 1:
        return np.stack([1 - scores, scores], axis=1)
    return scores


def _xgboost_scores(booster: Any, rows: Array, classes: Array | None) -> Array:
    import xgboost

    copied = booster.copy()
    copied.feature_names = None
    copied.feature_types = None
    if classes is not None and len(classes) > 2:  # multi:softmax answers labels
        copied.set_param({"objective": "multi:softprob"})
    return np.asarray(copied.predict(xgboost.DMatrix(rows)))


def _draw(model: Any, given: Columns) -> Array:
    """Return rows (ROWS, columns), FP32, on both sides of the thresholds of the trees; a few values are NaN.

    Columns of categories have codes, of which one more than the trees know.
    """
    random = np.random.default_rng(_SEED)
    columns = given.width
    low, high = np.full(columns, np.inf), np.full(columns, -np.inf)
    for node in model.graph.node:
        found = {attribute.name: attribute for attribute in node.attribute}
        if "nodes_featureids" not in found or "nodes_values" not in found:
            continue
        modes = [mode != b"LEAF" for mode in found["nodes_modes"].strings]
        used = np.asarray(found["nodes_featureids"].ints)[modes]
        values = np.asarray(found["nodes_values"].floats)[modes]
        np.minimum.at(low, used, values)
        np.maximum.at(high, used, values)
    unused = ~np.isfinite(low) | ~np.isfinite(high)
    low, high = np.where(unused, -1.0, low), np.where(unused, 1.0, high)
    margin = np.where(high > low, (high - low) / 2, np.maximum(np.abs(high), 1.0))
    rows = random.uniform(low - margin, high + margin, size=(ROWS, columns)).astype(np.float32)
    for at in given.coded:
        rows[:, at] = random.integers(0, max(int(high[at]), 0) + 2, size=ROWS)
    rows[-4:][random.random((4, columns)) < 0.3] = np.nan
    return rows


def xgboost_columns(booster: Any) -> Columns:
    """Return the columns of a Booster."""
    names = list(booster.feature_names or ())
    coded = frozenset(at for at, kind in enumerate(booster.feature_types or ()) if kind == "c")
    categories = {}
    if coded and names:
        model = json.loads(bytes(booster.save_raw("json")))["learner"]["gradient_booster"]["model"]
        for at, encoded in enumerate(model.get("cats", {}).get("enc", ())):
            if at in coded:
                categories[names[at]] = ColumnCategories(values=_decoded(encoded), coded=True, unseen="refused")
    return Columns(booster.num_features(), names, categories, coded)


def _decoded(encoded: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the categories of a column in XGBoost's JSON: numbers, or the bytes of texts with their offsets.

    Empty if they are not certain: XGBoost 3.2 counts characters of a DataFrame's texts, and so cuts off bytes of others
    than ASCII.
    """
    values, offsets = encoded["values"], encoded.get("offsets")
    if offsets is None:
        return tuple(values)
    data = np.array(values, np.int8).tobytes()
    if not data.isascii():
        return ()
    return tuple(data[start:end].decode() for start, end in pairwise(offsets))


def lightgbm_columns(booster: Any) -> Columns:
    """Return the columns of a Booster. Its file has the categories, but not always of which columns they are."""
    count = booster.num_feature()
    names = booster.feature_name()
    if names == [f"Column_{at}" for at in range(count)]:
        names = []
    text = booster.model_to_string(num_iteration=1)
    listed = _FEATURES.search(text)
    infos = _INFOS.search(text)
    seen = [_codes(info) for info in infos[1].split()] if infos else []
    coded = [int(at) for at in listed[1].split(",") if at] if listed else []
    coded = coded or [at for at, codes in enumerate(seen) if codes]
    known = booster.pandas_categorical or []
    if not known or not names:
        return Columns(count, names, {}, frozenset(coded))
    fits = len(known) == len(coded) and all(
        max(seen[at], default=-1) < len(values) for at, values in zip(coded, known, strict=True)
    )
    if not fits:
        return Columns(count, names, dict.fromkeys(names, _UNKNOWN), frozenset(coded))
    categories = {
        names[at]: ColumnCategories(values=tuple(values), coded=True, unseen="missing")
        if all(isinstance(value, str | bool | int | float) for value in values)
        else _UNKNOWN
        for at, values in zip(coded, known, strict=True)
    }
    return Columns(count, names, categories, frozenset(coded))


def _codes(info: str) -> list[int]:
    """Return the codes that a column of categories had; none for a column of numbers, "[least:largest]"."""
    return [] if info == "none" or info.startswith("[") else [int(code) for code in info.split(":")]


def catboost_columns(model: Any) -> Columns:
    """Return the columns of a model without categories."""
    names = list(model.feature_names_ or [])
    return Columns(len(names), [] if names == [str(at) for at in range(len(names))] else names)
