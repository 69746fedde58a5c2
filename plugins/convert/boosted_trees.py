"""Imports boosted trees from the formats of their own libraries, none of which is a pickle.

XGBoost: JSON or UBJSON (save_model) · LightGBM: text (save_model) · CatBoost: CBM (save_model)
Damage in LightGBM's text ends the process of the library that reads it, so it is found before. Its format, by
`GBDT::SaveModelToString` and `Tree::ToString`: a header of KEY=VALUE lines, with the bytes of each tree in
`tree_sizes`; the trees; `end of trees`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from millstream.plugins.convert.base import Imported, Importer
from millstream.services.errors import invalid
from millstream.services.ingest.file_kind import HEAD_BYTES
from millstream.services.ingest.importers import ImportOptions, Source

_XGBOOST_JSON = re.compile(rb'\s*\{\s*"(learner|version)"')
_XGBOOST_UBJ = re.compile(rb"\{L.{8}(learner|version)|\{[iUIlL].{1,8}(learner|version)", re.DOTALL)
END = "end of trees"
_FIRST = "\nTree=0\n"
#: lists of a tree with one element for each split
_OF_SPLITS = ("split_feature", "threshold", "decision_type", "left_child", "right_child")
_CHILDREN = ("left_child", "right_child")


def _head(source: Source) -> bytes:
    if not source.path.is_file():
        return b""
    with source.path.open("rb") as file:
        return file.read(HEAD_BYTES)


class XgboostImporter(Importer):
    """Imports what XGBoost's `save_model` writes."""

    name = "XGBoost"
    extra = "xgboost"
    modules = ("xgboost", "onnxmltools", "skl2onnx")
    executes = False
    rehearsal = "millstream.plugins.convert.scikit_conversion:load_scikit_learn"

    def recognises(self, source: Source) -> bool:
        head = _head(source)
        if _XGBOOST_JSON.match(head):
            return b'"learner"' in head or _has_learner(source.path)
        return _XGBOOST_UBJ.match(head) is not None

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        import xgboost

        from millstream.plugins.convert.boosted_conversion import convert_boosted

        booster = xgboost.Booster()
        try:
            booster.load_model(bytearray(source.path.read_bytes()))
        except xgboost.core.XGBoostError as error:
            cause = str(error).split("Stack trace")[0].split("] ", 1)[-1]
            raise invalid(
                f"XGBoost {xgboost.__version__} cannot read the model: {' '.join(cause.split())[:300]}; save it again "
                "with save_model('model.ubj')"
            ) from error
        return convert_boosted(self.name, booster, source.folder)


class LightgbmImporter(Importer):
    """Imports what LightGBM's `save_model` writes."""

    name = "LightGBM"
    extra = "lightgbm"
    modules = ("lightgbm", "onnxmltools", "skl2onnx")
    executes = False
    rehearsal = "millstream.plugins.convert.scikit_conversion:load_scikit_learn"

    def recognises(self, source: Source) -> bool:
        return _head(source).startswith((b"tree\nversion=", b"tree\r\nversion="))

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        import lightgbm

        from millstream.plugins.convert.boosted_conversion import convert_boosted

        text = source.path.read_text(encoding="utf-8", errors="replace")
        fault = text_fault(text)
        if fault is not None:  # the library would end the process or answer with the trees that are there
            raise invalid(f"the LightGBM model is damaged: {fault}; copy it or download it again")
        try:
            booster = lightgbm.Booster(model_str=text)
        except lightgbm.basic.LightGBMError as error:
            raise invalid(f"LightGBM {lightgbm.__version__} cannot read the model: {error}") from error
        return convert_boosted(self.name, booster, source.folder)


class CatboostImporter(Importer):
    """Imports what CatBoost's `save_model` writes."""

    name = "CatBoost"
    extra = "catboost"
    modules = ("catboost",)
    executes = False

    def recognises(self, source: Source) -> bool:
        return _head(source).startswith(b"CBM1")

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        import catboost

        from millstream.plugins.convert.boosted_conversion import convert_boosted

        model = catboost.CatBoost()
        try:
            model.load_model(str(source.path), format="cbm")
        except catboost.CatBoostError as error:
            cause = " ".join(str(error).split())[:300]
            raise invalid(f"CatBoost {catboost.__version__} cannot read the model: {cause}") from error
        return convert_boosted(self.name, model, source.folder)


def _has_learner(path: Path) -> bool:
    """Return whether a JSON file has the key `learner`, which may come after a long first value."""
    tail = b""
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            if b'"learner"' in tail + chunk:
                return True
            tail = chunk[-16:]
    return False


def text_fault(text: str) -> str | None:
    """Return what is wrong with the text of a model, for people; None: nothing that this finds."""
    end = text.find(END)
    if end < 0:
        return f"it was cut short: it has no `{END}`"
    first = text.find(_FIRST, 0, end)
    if first < 0:
        return "it has no tree"
    head = _values(text[:first])
    try:
        sizes = [int(word) for word in head["tree_sizes"].split()]
        features = int(head["max_feature_idx"]) + 1
    except KeyError as error:
        return f"its header has no line {error.args[0]}"
    except ValueError:
        return "its header has no number where one should be"
    data = text[first + 1 : end].encode()
    at = 0
    for number, size in enumerate(sizes):
        fault = _tree_fault(data[at : at + size], number, features)
        if fault is not None:
            return fault
        at += size
    return None if len(data) == at else "it has more or fewer trees than its header says"


def _tree_fault(data: bytes, number: int, features: int) -> str | None:
    if not data.startswith(b"Tree=%d\n" % number):
        return f"tree {number} does not begin where the header says"
    values = _values(data.decode(errors="replace"))
    lists: dict[str, list[float]] = {}
    for name in ("num_leaves", *_OF_SPLITS, "leaf_value"):
        if name not in values:
            return f"tree {number} has no line {name}"
        try:
            lists[name] = [float(word) for word in values[name].split()]
        except ValueError:
            return f"tree {number}: {name} has a value that is no number"
        leaves = lists["num_leaves"][0] if lists["num_leaves"] else 0
        wanted = {"num_leaves": 1, "leaf_value": leaves}.get(name, leaves - 1)
        if len(lists[name]) != wanted:
            return f"tree {number}: {name} has {len(lists[name])} values instead of {wanted:g}"
    for name in _CHILDREN:
        if not all(-leaves <= child < leaves - 1 for child in lists[name]):
            return f"tree {number}: {name} names a node that it does not have"
    if not all(0 <= feature < features for feature in lists["split_feature"]):
        return f"tree {number} splits by a feature that the model does not have"
    return None


def _values(text: str) -> Mapping[str, str]:
    """Return the KEY=VALUE lines of a text."""
    pairs = (line.partition("=") for line in text.splitlines())
    return {key: value for key, equals, value in pairs if equals}
