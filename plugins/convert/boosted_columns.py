"""What the columns of boosted trees are called, and their categories, as the libraries write them into their files.

Each library has its own meaning of a value without a category: XGBoost refuses it, LightGBM takes it for a missing one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from millstream.services.model.manifest import ColumnCategories

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
