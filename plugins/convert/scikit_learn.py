"""Imports models of scikit-learn from a pickle, a joblib file or a skops file.

pickle ─> allowed? ─> loaded (importers.pickles) ─> ONNX by skl2onnx (importers.scikit_conversion)
skops  ─> loaded (importers.skops_files) ─> the same
Both load classes on one list (importers.listed_types).
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from millstream.plugins.convert.base import SCRATCH, Imported, Importer
from millstream.plugins.convert.pickles import load_pickle
from millstream.plugins.convert.skops_files import SCHEMA, load_skops
from millstream.services.errors import invalid
from millstream.services.ingest.file_kind import PICKLE_REFUSAL, content_head, is_pickle
from millstream.services.ingest.importers import ImportOptions, Source

#: modules that the pickle of an estimator names near its beginning
_MODULES = (b"sklearn", b"xgboost", b"lightgbm", b"catboost")
_SCHEMA_BYTES_MAX = 64 << 20
#: modules that only pickles of other frameworks name
_OTHERS = (b"torch", b"keras", b"tensorflow", b"jax")


class PickleImporter(Importer):
    """Imports pickles and joblib files."""

    name = "scikit-learn"
    extra = "scikit-learn"
    modules = ("sklearn", "skl2onnx")
    rehearsal = "millstream.plugins.convert.rehearsals:load_scikit_learn"

    def recognises(self, source: Source) -> bool:
        if not source.path.is_file():
            return False
        head = content_head(source.path)
        return is_pickle(head) and any(module in head for module in _MODULES) and not any(m in head for m in _OTHERS)

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        from millstream.plugins.convert.scikit_conversion import check_state, convert_estimator

        if not options.allow_pickle:
            raise invalid(PICKLE_REFUSAL)
        model = load_pickle(source.path, source.folder / SCRATCH, check_state)
        return convert_estimator(model, source.folder)


class SkopsImporter(Importer):
    """Imports files of skops.io, which name their types and need no pickle."""

    name = "skops"
    extra = "scikit-learn"
    modules = ("sklearn", "skl2onnx")
    rehearsal = "millstream.plugins.convert.rehearsals:load_scikit_learn"

    def recognises(self, source: Source) -> bool:
        if not source.path.is_file() or not zipfile.is_zipfile(source.path):
            return False
        schema = _schema(source.path)
        return isinstance(schema, dict) and "__loader__" in schema and "_skops_version" in schema

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        from millstream.plugins.convert.scikit_conversion import check_state, convert_estimator

        return convert_estimator(load_skops(source.path, check_state), source.folder)


def _schema(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            if SCHEMA not in archive.namelist() or archive.getinfo(SCHEMA).file_size > _SCHEMA_BYTES_MAX:
                return None
            return json.loads(archive.read(SCHEMA))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, RecursionError):
        return None
