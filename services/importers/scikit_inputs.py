"""What an estimator of scikit-learn takes: its columns, their kinds, and values to try it with.

An estimator knows the number of its columns, and their names if it was fitted with a table. Their kinds and ranges are
read from its fitted parts: categories of encoders, means of scalers, centres, thresholds of trees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from millstream.services.errors import invalid

Array = np.ndarray[Any, Any]

ROWS = 64
#: of a table; a pickle may claim any number, and each takes time here
COLUMNS_MAX = 1 << 16
_SEED = 20
#: name of the one input of an estimator whose columns are all numbers
INPUT = "input"


class Column(NamedTuple):
    """One column of a table: its values to draw from (text or numbers), or the range of its numbers."""

    name: str
    text: bool
    values: Sequence[Any] = ()
    low: float = -2.0
    high: float = 2.0


class Inputs(NamedTuple):
    """The inputs of a converted estimator.

    Args:
        columns: of the table, in the order in which the estimator was fitted.
        table: whether each column is an input of its own; else all are one input of numbers or text.
    """

    columns: tuple[Column, ...]
    table: bool

    @property
    def named(self) -> tuple[str, ...]:
        """The names of the columns of the one input, if the estimator was fitted with names."""
        names = tuple(column.name for column in self.columns)
        plain = tuple(f"{INPUT}{at}" for at in range(len(names)))
        return () if self.table or names in {plain, (INPUT,)} else names

    @property
    def text(self) -> bool:
        """Whether the one input is text."""
        return any(column.text for column in self.columns)


def inputs_of(model: Any) -> Inputs:
    """Return the inputs of a fitted estimator. Raises Failure(INVALID) if it does not say how many it has."""
    first = _first_step(model)
    if _is_text_vectorizer(first):
        words = list(getattr(first, "vocabulary_", {}))[:1000] or ["text"]
        return Inputs((Column(INPUT, text=True, values=words),), table=False)
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
    table = bool(names) and _picks_columns(first)
    labels = names if len(names) == count else [f"{INPUT}{at}" for at in range(count)]
    return Inputs(tuple(kind._replace(name=label) for kind, label in zip(kinds, labels, strict=True)), table)


def draw(inputs: Inputs, rows: int = ROWS) -> list[Array]:
    """Return random values of each column, (rows,) each: FP32 or text, the same ones each time."""
    random = np.random.default_rng(_SEED)
    return [_draw(column, rows, random) for column in inputs.columns]


def _draw(column: Column, rows: int, random: np.random.Generator) -> Array:
    if column.text and column.name == INPUT:  # texts of several words
        texts = [" ".join(map(str, random.choice(column.values, size=5))) for _ in range(rows)]
        return np.array(texts, dtype=object)
    if len(column.values):
        chosen = [column.values[int(at)] for at in random.integers(len(column.values), size=rows)]
        return np.array(chosen, dtype=object if column.text else np.float32)
    return random.uniform(column.low, column.high, size=rows).astype(np.float32)


def _first_step(model: Any) -> Any:
    steps = getattr(model, "steps", None)
    while steps:
        model = steps[0][1]
        steps = getattr(model, "steps", None)
    return model


def _is_text_vectorizer(step: Any) -> bool:
    return any(
        kind.__name__ in {"CountVectorizer", "TfidfVectorizer", "HashingVectorizer"} for kind in type(step).mro()
    )


def _picks_columns(step: Any) -> bool:
    """Return whether an estimator treats columns differently, so that they must keep their names and kinds."""
    return type(step).__name__ == "ColumnTransformer"


def _kinds(model: Any, count: int, names: list[str]) -> list[Column]:
    """Return the columns, without names."""
    columns = [Column("", text=False) for _ in range(count)]
    for part, positions in _parts(model, list(range(count)), names):
        categories = getattr(part, "categories_", None)
        if categories is not None and len(categories) == len(positions):
            for position, known in zip(positions, categories, strict=True):
                columns[position] = _of_categories(known)
            continue
        for position, (low, high) in zip(positions, _ranges(part, len(positions)), strict=False):
            if not len(columns[position].values):
                columns[position] = columns[position]._replace(low=low, high=high)
    return columns


def _of_categories(known: Any) -> Column:
    values = [value for value in np.asarray(known).tolist() if value is not None and value == value]  # noqa: PLR0124 - NaN
    text = any(isinstance(value, str) for value in values)
    return Column("", text=text, values=values if text else [float(value) for value in values])


def _parts(model: Any, positions: list[int], names: list[str]) -> Iterator[tuple[Any, list[int]]]:
    """Yield the fitted parts of a model that see its columns as they are, with the positions that they see."""
    yield model, positions
    steps = getattr(model, "steps", None)
    if steps:
        for _, step in steps:
            yield from _parts(step, positions, names)
            if hasattr(step, "transform"):
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
            low, high = points.min(axis=0), points.max(axis=0)
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
