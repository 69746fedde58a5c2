"""What an estimator of scikit-learn takes: its columns, their kinds, and values to try it with.

An estimator knows the number of its columns, and their names if it was fitted with a table. Their kinds and ranges are
read from its fitted parts: categories of encoders, means of scalers, centres, thresholds of trees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from millstream.services.errors import invalid
from millstream.services.model.manifest import ColumnCategories

Array = np.ndarray[Any, Any]

ROWS = 64
#: of a table; a pickle may claim any number, and each takes time here
COLUMNS_MAX = 1 << 16
_SEED = 20
_ODD_SHARE = 0.1  # of the rows of a column of text: missing ones, and others than its categories
UNSEEN = "no such category"
#: the text that a converted model takes for a missing one
MISSING = ""
#: name of the one input of an estimator whose columns are all numbers
INPUT = "input"


class TableColumn(NamedTuple):
    """One column of a table.

    Args:
        text: it has text, else numbers.
        values: to draw from: text or numbers.
        low, high: the range of its numbers, where no values are known.
        words: each of its texts has several of the values.
        unseen: what other text than the values is: refused, or what the converted model answers as scikit-learn does.
        missing: its text may be missing, which the converted model takes as an empty text.
    """

    name: str
    text: bool
    values: Sequence[Any] = ()
    low: float = -2.0
    high: float = 2.0
    words: bool = False
    unseen: Literal["refused", "model"] = "model"
    missing: bool = False


class EstimatorInputs(NamedTuple):
    """The inputs of a converted estimator.

    Args:
        columns: of the table, in the order in which the estimator was fitted.
        table: whether each column is an input of its own; else all are one input of numbers or text.
    """

    columns: tuple[TableColumn, ...]
    table: bool

    @property
    def named(self) -> tuple[str, ...]:
        """The names of the columns, if the estimator was fitted with names."""
        names = tuple(column.name for column in self.columns)
        plain = tuple(f"{INPUT}{at}" for at in range(len(names)))
        return () if names in {plain, (INPUT,)} else names

    @property
    def categories(self) -> dict[str, ColumnCategories]:
        """The categories of the columns of text, by name."""
        return {
            column.name: ColumnCategories(
                values=tuple(column.values), unseen=column.unseen, empty_is_missing=column.missing
            )
            for column in self.columns
            if column.text and not column.words
        }

    @property
    def text(self) -> bool:
        """Whether the one input is text."""
        return any(column.text for column in self.columns)


def inputs_of(model: Any) -> EstimatorInputs:
    """Return the inputs of a fitted estimator. Raises Failure(INVALID) if it does not say how many it has."""
    first = _first_step(model)
    if _is_text_vectorizer(first):
        return EstimatorInputs((TableColumn(INPUT, text=True, values=_words(first), words=True),), table=False)
    count = getattr(model, "n_features_in_", getattr(first, "n_features_in_", None))
    if count is None:
        raise invalid(
            f"the {type(model).__name__} does not say how many columns it takes (n_features_in_): is it fitted? Fit it "
            "with a table of all columns and save it again"
        )
    count = int(count)
    if not 1 <= count <= COLUMNS_MAX:
        raise invalid(f"the model takes {count} columns: from 1 to {COLUMNS_MAX} can be served")
    names = [str(name) for name in getattr(model, "feature_names_in_", getattr(first, "feature_names_in_", ()))]
    kinds = _kinds(model, count, names)
    mixed = len({kind.text for kind in kinds}) > 1
    table = bool(names) and (_picks_columns(first) or mixed)
    labels = names if len(names) == count else [f"{INPUT}{at}" for at in range(count)]
    return EstimatorInputs(tuple(kind._replace(name=label) for kind, label in zip(kinds, labels, strict=True)), table)


def draw(inputs: EstimatorInputs, rows: int = ROWS) -> list[Array]:
    """Return random values of each column, (rows,) each: FP32 or text, the same ones each time."""
    random = np.random.default_rng(_SEED)
    return [_draw(column, rows, random) for column in inputs.columns]


def _draw(column: TableColumn, rows: int, random: np.random.Generator) -> Array:
    if column.words:
        texts = [" ".join(map(str, random.choice(column.values, size=5))) for _ in range(rows)]
        return np.array(texts, dtype=object)
    if len(column.values):
        chosen = [column.values[int(at)] for at in random.integers(len(column.values), size=rows)]
        if not column.text:
            return np.array(chosen, dtype=np.float32)
        drawn = np.array(chosen, dtype=object)
        if column.unseen == "model":
            drawn[random.random(rows) < _ODD_SHARE] = UNSEEN
        if column.missing:
            drawn[random.random(rows) < _ODD_SHARE] = MISSING
        return drawn
    return random.uniform(column.low, column.high, size=rows).astype(np.float32)


def _first_step(model: Any) -> Any:
    """Return the step that sees the columns first, also of a search's best pipeline."""
    while True:
        steps = getattr(model, "steps", None)
        inner = steps[0][1] if steps else getattr(model, "best_estimator_", None)
        if inner is None:
            return model
        model = inner


def _is_text_vectorizer(step: Any) -> bool:
    return any(
        kind.__name__ in {"CountVectorizer", "TfidfVectorizer", "HashingVectorizer"} for kind in type(step).mro()
    )


def _picks_columns(step: Any) -> bool:
    """Return whether an estimator treats columns differently, so that they must keep their names and kinds."""
    return type(step).__name__ == "ColumnTransformer"


def _kinds(model: Any, count: int, names: list[str]) -> list[TableColumn]:
    """Return the columns, without names."""
    columns = [TableColumn("", text=False) for _ in range(count)]
    imputed: set[int] = set()
    for part, positions in _parts(model, list(range(count)), names):
        categories = getattr(part, "categories_", None)
        if categories is not None and len(categories) == len(positions):
            for position, known in zip(positions, categories, strict=True):
                columns[position] = _of_categories(part, known, columns[position], imputed=position in imputed)
            continue
        if _is_text_vectorizer(part):
            for position in positions:
                columns[position] = TableColumn("", text=True, values=_words(part), words=True)
            continue
        if imputes_text(part):
            imputed |= set(positions)
            continue
        for position, (low, high) in zip(positions, _ranges(part, len(positions)), strict=False):
            if not len(columns[position].values):
                columns[position] = columns[position]._replace(low=low, high=high)
    return columns


def _of_categories(encoder: Any, known: Any, before: TableColumn, *, imputed: bool) -> TableColumn:
    """Return a column that an encoder sees. `before`: what another one has shown of it."""
    values = [value for value in np.asarray(known).tolist() if not is_missing(value)]
    if not any(isinstance(value, str) for value in values):
        return TableColumn("", text=False, values=[float(value) for value in values])
    kind, handling = type(encoder).__name__, getattr(encoder, "handle_unknown", None)
    takes_all = (kind, handling) in {("OneHotEncoder", "ignore"), ("OrdinalEncoder", "use_encoded_value")}
    has_missing = len(values) < len(known)
    missing = imputed or (has_missing and kind == "OneHotEncoder") or (takes_all and not has_missing)
    if missing and MISSING in values and not has_missing and not imputed:
        missing = False  # an empty text is a category
    elif missing and MISSING in values:
        raise invalid("a column of the model has missing values and the category '': fill one of them with a text")
    return TableColumn(
        "",
        text=True,
        values=values,
        unseen="model" if takes_all and before.unseen == "model" else "refused",
        missing=missing or before.missing,
    )


def is_missing(value: Any) -> bool:
    """Return whether a category or a marker of missing values is NaN or None."""
    return value is None or (isinstance(value, float) and np.isnan(value))


def imputes_text(part: Any) -> bool:
    """Return whether an estimator replaces missing text, NaN or None, and keeps all columns in their places."""
    if type(part).__name__ != "SimpleImputer" or not hasattr(part, "statistics_"):
        return False
    if part.add_indicator or not is_missing(part.missing_values):
        return False
    return all(isinstance(value, str) for value in np.asarray(part.statistics_, object).tolist())


def _words(vectorizer: Any) -> Sequence[str]:
    return list(getattr(vectorizer, "vocabulary_", {}))[:1000] or ["text"]


def _parts(model: Any, positions: list[int], names: list[str]) -> Iterator[tuple[Any, list[int]]]:
    """Yield the fitted parts of a model that see its columns as they are, with the positions that they see."""
    yield model, positions
    steps = getattr(model, "steps", None)
    if steps:
        for _, step in steps:
            yield from _parts(step, positions, names)
            if hasattr(step, "transform") and not imputes_text(step):
                return
    if hasattr(model, "transformers_"):
        for _, part, selected in model.transformers_:
            if not isinstance(part, str):
                yield from _parts(part, _selected(selected, positions, names), names)
    for inner in _inner(model):
        yield from _parts(inner, positions, names)


def _inner(model: Any) -> list[Any]:
    """Return the fitted estimators of an ensemble or a search, which see the same columns."""
    members = getattr(model, "estimators_", None)
    if isinstance(members, np.ndarray):
        members = members.ravel().tolist()
    found = [member for member in (members or [])[:100] if hasattr(member, "fit")]
    one = getattr(model, "best_estimator_", None)
    return [*found, one] if one is not None else found


def _selected(selected: Any, positions: list[int], names: list[str]) -> list[int]:
    if isinstance(selected, slice):
        return positions[selected]
    chosen = list(np.atleast_1d(np.asarray(selected, dtype=object)))
    if chosen and isinstance(chosen[0], bool | np.bool_):
        return [position for position, wanted in zip(positions, chosen, strict=False) if wanted]
    return [names.index(one) if isinstance(one, str) else positions[int(one)] for one in chosen]


def _ranges(part: Any, count: int) -> list[tuple[float, float]]:
    """Return a range for each column, as a fitted part of the model shows it; empty if it shows none."""
    if _vector(part, "data_min_", count) is not None and _vector(part, "data_max_", count) is not None:
        return list(zip(part.data_min_.tolist(), part.data_max_.tolist(), strict=True))
    mean = _vector(part, "mean_", count)
    if mean is not None:
        spread = _vector(part, "scale_", count)
        spread = np.ones(count) if spread is None else spread
        return list(zip((mean - 2 * spread).tolist(), (mean + 2 * spread).tolist(), strict=True))
    for name in ("support_vectors_", "cluster_centers_", "_fit_X", "theta_", "means_"):
        points = getattr(part, name, None)
        if isinstance(points, np.ndarray) and points.ndim == 2 and points.shape[1] == count and len(points):
            low, high = np.nan_to_num(np.nanmin(points, axis=0)), np.nan_to_num(np.nanmax(points, axis=0))
            margin = (high - low) / 4
            return list(zip((low - margin).tolist(), (high + margin).tolist(), strict=True))
    tree = getattr(part, "tree_", None)
    return _thresholds(tree, count) if tree is not None else []


def _thresholds(tree: Any, count: int) -> list[tuple[float, float]]:
    ranges = []
    for column in range(count):
        used = tree.threshold[tree.feature == column]
        low, high = (float(used.min()), float(used.max())) if len(used) else (-1.0, 1.0)
        margin = (high - low) / 2 or 1.0
        ranges.append((low - margin, high + margin))
    return ranges


def _vector(part: Any, name: str, count: int) -> Array | None:
    value = getattr(part, name, None)
    return value if isinstance(value, np.ndarray) and value.shape == (count,) else None
