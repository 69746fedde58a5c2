"""Imports models of scikit-learn from a pickle, a joblib file or a skops file.

pickle ─> allowed? ─> scanned (importers.pickles) ─> loaded ─> ONNX by skl2onnx (importers.scikit_conversion)
skops  ─> its types listed without a pickle ─> all known? ─> loaded ─> the same
"""

from __future__ import annotations

import json
import zipfile
from pathlib import Path
from typing import Any

from millstream.services.errors import invalid
from millstream.services.importers.base import SCRATCH, Imported, ImportOptions, Source
from millstream.services.importers.pickles import load_pickle
from millstream.services.ingest.file_kind import PICKLE_REFUSAL, content_head, is_pickle

#: modules that the pickle of an estimator names near its beginning
_MODULES = (b"sklearn", b"xgboost", b"lightgbm", b"catboost")
_SCHEMA = "schema.json"
_SCHEMA_BYTES_MAX = 64 << 20
#: modules that only pickles of other frameworks name
_OTHERS = (b"torch", b"keras", b"tensorflow", b"jax")


class PickleImporter:
    """Imports pickles and joblib files."""

    name = "scikit-learn"
    extra = "scikit-learn"
    modules = ("sklearn", "skl2onnx")

    def recognises(self, source: Source) -> bool:
        if not source.path.is_file():
            return False
        head = content_head(source.path)
        return is_pickle(head) and any(module in head for module in _MODULES) and not any(m in head for m in _OTHERS)

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        from millstream.services.importers.scikit_conversion import check_version, convert_estimator

        if not options.allow_pickle:
            raise invalid(PICKLE_REFUSAL)
        model, scan = load_pickle(source.path, source.folder / SCRATCH)
        check_version(scan.sklearn_version)
        return convert_estimator(model, source.folder)


class SkopsImporter:
    """Imports files of skops.io, which name their types and need no pickle."""

    name = "skops"
    extra = "scikit-learn"
    modules = ("sklearn", "skl2onnx", "skops")

    def recognises(self, source: Source) -> bool:
        if not source.path.is_file() or not zipfile.is_zipfile(source.path):
            return False
        schema = _schema(source.path)
        return isinstance(schema, dict) and "__loader__" in schema and "_skops_version" in schema

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        import skops.io

        from millstream.services.importers.scikit_conversion import convert_estimator

        try:
            untrusted = skops.io.get_untrusted_types(file=source.path)
            custom = [name for name in untrusted if not _is_known(name)]
            if custom:
                raise invalid(
                    f"the skops file needs {custom[0][:200]}, which is no part of scikit-learn: a custom class cannot "
                    "be converted; rebuild that step with the library's own ones, or export the model to ONNX where "
                    "it was made"
                )
            model = skops.io.load(source.path, trusted=untrusted)
        except (zipfile.BadZipFile, KeyError, EOFError) as error:
            raise invalid(f"the skops file is broken or cut short: {type(error).__name__}: {error}") from error
        return convert_estimator(model, source.folder)


def _is_known(name: str) -> bool:
    return name.partition(".")[0] in {"sklearn", "numpy", "scipy", "xgboost", "lightgbm", "catboost"}


def _schema(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            if _SCHEMA not in archive.namelist() or archive.getinfo(_SCHEMA).file_size > _SCHEMA_BYTES_MAX:
                return None
            return json.loads(archive.read(_SCHEMA))
    except (zipfile.BadZipFile, ValueError, NotImplementedError, RuntimeError, RecursionError):
        return None
