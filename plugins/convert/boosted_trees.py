"""Imports boosted trees from the formats of their own libraries, none of which is a pickle.

XGBoost: JSON or UBJSON (save_model) · LightGBM: text (save_model) · CatBoost: CBM (save_model)
"""

from __future__ import annotations

import re
from pathlib import Path

from millstream.plugins.convert.base import Imported, Importer
from millstream.plugins.convert.lightgbm_text import text_fault
from millstream.services.errors import invalid
from millstream.services.ingest.file_kind import HEAD_BYTES
from millstream.services.ingest.importers import ImportOptions, Source

_XGBOOST_JSON = re.compile(rb'\s*\{\s*"(learner|version)"')
_XGBOOST_UBJ = re.compile(rb"\{L.{8}(learner|version)|\{[iUIlL].{1,8}(learner|version)", re.DOTALL)


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
    rehearsal = "millstream.plugins.convert.rehearsals:load_scikit_learn"

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
    rehearsal = "millstream.plugins.convert.rehearsals:load_scikit_learn"

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
