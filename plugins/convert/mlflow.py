"""Imports the folders that MLflow's `save_model` writes, by the flavour that holds the model itself.

MLmodel ─> its flavours, the one that is converted best ─> the importer of that file ─> its columns compared with the
signature. Source: MLflow, "MLflow Model Storage Format": flavors, signature, and the keys of each flavour.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from millstream.plugins.convert.base import Imported, Importer, path_below
from millstream.plugins.convert.held import import_onnx, importer_of
from millstream.services.errors import invalid
from millstream.services.ingest.importers import ImportOptions, Members, Source
from millstream.services.ingest.layout import find_onnx
from millstream.services.model.manifest import ColumnCategories

DOCUMENT = "MLmodel"
_DOCUMENT_BYTES_MAX = 4 << 20
#: flavour -> the keys that may name its file or folder; the first flavour that a model has is imported
_FLAVOURS: Mapping[str, tuple[str, ...]] = {
    "onnx": ("data",),
    "xgboost": ("data",),
    "lightgbm": ("data",),
    "catboost": ("data",),
    "sklearn": ("pickled_model", "model_path"),
    "pytorch": ("model_data",),
    "keras": ("data",),
    "tensorflow": ("data", "saved_model_dir"),
    "transformers": ("model_binary",),
}
#: types of columns in which MLflow's server refuses a null: pandas would make floats of them
_WITHOUT_NULL = frozenset({"integer", "long", "boolean"})


class MlflowImporter(Importer):
    """Imports MLflow's model folders."""

    name = "MLflow"
    extra = "mlflow"
    modules = ("yaml",)
    described = True
    marks = frozenset({DOCUMENT})

    def recognises(self, source: Source) -> bool:
        return source.path.is_dir() and (source.path / DOCUMENT).is_file()

    def members(self, folder: Path) -> Members:
        """Return all files: the model's code and its requirements are needed where MLflow itself serves it."""
        return Members(["**/*"])

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        document = _read(source.path / DOCUMENT)
        flavour, path = _chosen(source.path, document.get("flavors"))
        signature = document.get("signature")
        specs = _specs(signature.get("inputs") if isinstance(signature, dict) else None)
        columns = _columns(specs)
        if flavour == "onnx":
            imported = import_onnx(source, _onnx_file(path), ())._replace(columns=columns)
        else:
            found = _file_of(path)
            importer = importer_of(source, found, "the MLflow model")
            if importer is None:
                raise invalid(
                    f"the flavour {flavour} of the MLflow model holds {found.name[:80]!a}, which cannot be imported: "
                    "log it with mlflow.onnx"
                )
            imported = importer.convert(Source(source.folder, found), options)
        _check_columns(imported, columns)
        made = f"MLflow {str(document.get('mlflow_version', ''))[:20]} ({flavour})"
        return imported._replace(
            producer=f"{made}, {imported.producer}",
            columns=columns or imported.columns,
            categories=_renamed(imported, columns),
            columns_without_null=[str(spec["name"]) for spec in specs if columns and spec.get("type") in _WITHOUT_NULL],
        )


def _read(path: Path) -> dict[str, Any]:
    import yaml

    try:
        text = _text(path)
        if re.search(r"(?m)[:\-\[,]\s*[&*]\w", text):  # an alias could make a small document a huge one
            raise invalid(f"the MLflow model's {DOCUMENT} has aliases: save the model again")
        document = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise invalid(f"the MLflow model's {DOCUMENT} is not YAML: {' '.join(str(error).split())[:200]}") from error
    if not isinstance(document, dict) or not isinstance(document.get("flavors"), dict):
        raise invalid(f"the MLflow model's {DOCUMENT} has no flavors")
    return document


def _text(path: Path) -> str:
    if path.stat().st_size > _DOCUMENT_BYTES_MAX:
        raise invalid(f"the MLflow model's {DOCUMENT} has more than {_DOCUMENT_BYTES_MAX} bytes")
    return path.read_text(errors="surrogateescape")


def _chosen(folder: Path, flavours: Any) -> tuple[str, Path]:
    """Return the flavour to import and its file or folder. Raises Failure(INVALID)."""
    for flavour, keys in _FLAVOURS.items():
        settings = flavours.get(flavour)
        if not isinstance(settings, dict):
            continue
        named = next((settings[key] for key in keys if isinstance(settings.get(key), str)), None)
        named = named or _of_python_function(flavours)
        if named is None:
            raise invalid(f"the flavour {flavour} of the MLflow model names no file ({' or '.join(keys)})")
        path = path_below(folder, named, f"the flavour {flavour} of the MLflow model")
        if not path.exists():
            raise invalid(f"the MLflow model has no {named[:80]!a}, which its flavour {flavour} names")
        return flavour, path
    names = ", ".join(str(name) for name in flavours)[:200]
    raise invalid(
        f"the MLflow model has the flavours {names}, none of which can be imported ({', '.join(_FLAVOURS)} can): log "
        "it with one of these"
    )


def _of_python_function(flavours: Mapping[str, Any]) -> str | None:
    settings = flavours.get("python_function")
    named = settings.get("data", settings.get("model_path")) if isinstance(settings, dict) else None
    return named if isinstance(named, str) else None


def _file_of(path: Path) -> Path:
    """Return what an importer is to recognise: of a folder, as PyTorch's flavour has it, the model's file."""
    if path.is_dir():
        for pattern in ("*.pt2", "model.keras", "*.keras", "model.pth", "model.pkl"):
            if found := sorted(path.glob(pattern)):
                return found[0]
    return path


def _onnx_file(path: Path) -> Path:
    found = find_onnx(path) if path.is_dir() else None
    return found.path if found is not None else path


def _specs(text: Any) -> list[dict[str, Any]]:
    """Return the inputs of a signature; none if there is no signature. Raises Failure(INVALID)."""
    try:
        specs = json.loads(text) if isinstance(text, str) else []
    except ValueError as error:
        raise invalid(f"the signature of the MLflow model is not JSON: {error}") from error
    if not isinstance(specs, list) or any(not isinstance(spec, dict) for spec in specs):
        raise invalid("the signature of the MLflow model is no list of columns")
    return specs


def _columns(specs: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of the columns of a signature; empty if it has none, or tensors."""
    if any(spec.get("type") == "tensor" for spec in specs):
        return ()
    names = tuple(str(spec["name"]) for spec in specs if "name" in spec)
    return names if len(names) == len(specs) else ()


def _check_columns(imported: Imported, columns: Sequence[str]) -> None:
    """Raise Failure(INVALID) if the signature has other columns than the model."""
    if not columns:
        return
    inputs = imported.samples[0].inputs
    if imported.columns and not _same_names(imported.columns, columns):
        raise invalid(f"the signature of the MLflow model has other columns than its model: {_shown(imported.columns)}")
    if len(inputs) > 1 and set(inputs) != set(columns):
        raise invalid(f"the signature of the MLflow model has other columns than its model: {_shown(list(inputs))}")
    only = next(iter(inputs.values()))
    if len(inputs) == 1 and only.ndim == 2 and only.shape[1] != len(columns):
        raise invalid(
            f"the signature of the MLflow model has {len(columns)} columns, and its model takes {only.shape[1]}"
        )


def _same_names(own: Sequence[str], columns: Sequence[str]) -> bool:
    """Return whether a model has these names. LightGBM writes an underscore for a blank."""
    return len(own) == len(columns) and all(
        name in {column, column.replace(" ", "_")} for name, column in zip(own, columns, strict=True)
    )


def _renamed(imported: Imported, columns: Sequence[str]) -> Mapping[str, ColumnCategories]:
    """Return the categories by the names of the signature, if it has any."""
    names = dict(zip(imported.columns, columns, strict=True)) if columns and imported.columns else {}
    return {names.get(name, name): one for name, one in imported.categories.items()}


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names)[:200]
