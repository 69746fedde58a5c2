"""Imports model folders of TensorFlow Serving: `1/saved_model.pb`, `2/saved_model.pb`, …

folders that are numbers ─> the highest ─> the importer of what it holds; the other versions become a note
Source: TensorFlow Serving, "Building Standard TensorFlow ModelServer" (the base path's layout).
"""

from __future__ import annotations

from pathlib import Path

from millstream.plugins.convert.base import Imported, Importer
from millstream.plugins.convert.held import convert_held
from millstream.plugins.convert.tensorflow import MEMBERS
from millstream.services.ingest.importers import ImportOptions, Members, Source
from millstream.services.ingest.onnx_folder import shown

_MODELS = ("saved_model.pb", "saved_model.pbtxt", "model.tflite")


class VersionedFolderImporter(Importer):
    """The importer of folders with numbered versions of a SavedModel."""

    name = "TensorFlow Serving"
    described = True

    def recognises(self, source: Source) -> bool:
        return bool(_versions(source.path))

    def members(self, folder: Path) -> Members:
        *others, newest = (version.name for version in _versions(folder))
        notes = (f"The folder has the versions {shown(others)}, too: push each as a version of its own.",)
        return Members([f"{newest}/{name}" for name in (*MEMBERS, *_MODELS)], notes if others else ())

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        newest = _versions(source.path)[-1]
        path = newest / "model.tflite" if (newest / "model.tflite").is_file() else newest
        return convert_held(source, path, options, f"version {newest.name} of the folder")


def _versions(path: Path) -> list[Path]:
    """Return the folders of versions, the newest last; none if the folder has anything else at its top."""
    if not path.is_dir():
        return []
    entries = [entry for entry in path.iterdir() if not entry.name.startswith(".")]
    if not entries or not all(entry.name.isdecimal() and entry.name.isascii() and entry.is_dir() for entry in entries):
        return []
    held = [entry for entry in entries if any((entry / name).is_file() for name in _MODELS)]
    return sorted(held, key=lambda entry: int(entry.name)) if len(held) == len(entries) else []
