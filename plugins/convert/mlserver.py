"""Imports model folders of MLServer.

model-settings.json ─> implementation (its runtime) and parameters.uri ─> the importer of what the uri names
Source: MLServer, docs/reference/model-settings.md, and load_model of its runtimes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millstream.plugins.convert.base import Imported, Importer, path_below, read_json
from millstream.plugins.convert.held import convert_held, held_members
from millstream.services.errors import invalid
from millstream.services.ingest.importers import ImportOptions, Members, Source

SETTINGS = "model-settings.json"
DOCUMENT_BYTES_MAX = 1 << 20
_WHAT = "the MLServer folder"
#: module of a runtime -> the files that it loads where the settings name none
_RUNTIMES: Mapping[str, tuple[str, ...]] = {
    "mlserver_sklearn": ("model.joblib", "model.pickle", "model.pkl"),
    "mlserver_xgboost": ("model.bst", "model.json", "model.ubj"),
    "mlserver_lightgbm": ("model.bst",),
    "mlserver_catboost": ("model.cbm",),
    "mlserver_onnx": ("model.onnx",),
    "mlserver_mlflow": (".",),
    "mlserver_huggingface": (".",),
}
_CODE = "a class in Python, which does not run here"
_KNOWN_PARAMETERS = frozenset({"uri", "version", "format", "content_type", "environment_tarball"})


class MLServerImporter(Importer):
    """The importer of folders with model-settings.json."""

    name = "MLServer"
    described = True
    marks = frozenset({SETTINGS})

    def recognises(self, source: Source) -> bool:
        return source.path.is_dir() and (source.path / SETTINGS).is_file()

    def members(self, folder: Path) -> Members:
        """Return the document, and what is the model in the file or folder that it names."""
        settings = _settings(folder / SETTINGS)
        parameters = _parameters(settings)
        path = _path(Source(folder, folder), str(settings.get("implementation", "")), parameters)
        held = held_members(folder, path)
        return held._replace(patterns=(SETTINGS, *held.patterns))

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        settings = _settings(source.path / SETTINGS)
        parameters = _parameters(settings)
        path = _path(source, str(settings.get("implementation", "")), parameters)
        return convert_held(source, path, options, _WHAT, _notes(settings, parameters))


def _settings(path: Path) -> Mapping[str, Any]:
    document = read_json(path, DOCUMENT_BYTES_MAX)
    if not isinstance(document, dict):
        raise invalid(f"{SETTINGS} is not a JSON object")
    return document


def _parameters(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    parameters = settings.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise invalid(f"{SETTINGS}: parameters is no object")
    return parameters


def _path(source: Source, implementation: str, parameters: Mapping[str, Any]) -> Path:
    runtime = implementation.partition(".")[0]
    names = _RUNTIMES.get(runtime)
    if names is None:
        raise invalid(
            f"{SETTINGS}: the implementation {implementation[:80]!a} is {_CODE}; the runtimes that are imported are "
            + ", ".join(sorted(_RUNTIMES))
        )
    uri = parameters.get("uri")
    if uri:
        path = _below(source.path, str(uri))
        names = (".", *names) if path.is_file() else names
        candidates = [path] if path.is_file() else [path / name for name in names]
    else:
        candidates = [source.path / name for name in names]
    found = next((path for path in candidates if path.exists()), None)
    if found is None:
        raise invalid(f"{_WHAT} has no {candidates[0].relative_to(source.path)}, which {SETTINGS} asks for")
    if found == source.path and not uri:
        raise invalid(f"{SETTINGS}: parameters.uri names no model in the folder")
    return found


def _below(folder: Path, uri: str) -> Path:
    if "://" in uri:
        raise invalid(
            f"{SETTINGS}: the uri {uri[:80]!a} is not in the folder: copy the model into it, and name it there"
        )
    return path_below(folder, uri, SETTINGS)


def _notes(settings: Mapping[str, Any], parameters: Mapping[str, Any]) -> list[str]:
    notes = []
    if parameters.get("environment_tarball"):
        notes.append("parameters.environment_tarball is not used: the model runs without Python.")
    unused = sorted(str(name) for name in parameters if name not in _KNOWN_PARAMETERS)
    if unused:
        notes.append(f"Parameters that are not used: {', '.join(unused)[:300]}.")
    if settings.get("inputs") or settings.get("outputs"):
        notes.append(
            "Names and shapes of tensors are those of the model; inputs and outputs in the settings are not used."
        )
    return notes
