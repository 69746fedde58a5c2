"""Imports archives of TorchServe (.mar), and the folders that they unpack to.

MAR-INF/MANIFEST.json ─> serializedFile ─> the importer of its content; what cannot run here becomes a note
Source: pytorch/serve, model-archiver/README.md ("Artifact Details").
"""

from __future__ import annotations

import shutil
import struct
import zipfile
from collections.abc import Mapping
from glob import escape
from pathlib import Path, PurePosixPath
from typing import Any

from millstream.plugins.convert.base import Imported, Importer, parse_json
from millstream.plugins.convert.held import convert_held
from millstream.services.errors import invalid
from millstream.services.ingest.file_kind import zip_names
from millstream.services.ingest.importers import IMPORTED, ImportOptions, Members, Source

MANIFEST = "MAR-INF/MANIFEST.json"
DOCUMENT_BYTES_MAX = 1 << 20
MEMBERS_MAX = 10_000
_WHAT = "the TorchServe archive"
_FOLDER = "serialized"


class TorchServeImporter(Importer):
    """The importer of what torch-model-archiver wrote."""

    name = "TorchServe"
    described = True

    def recognises(self, source: Source) -> bool:
        return (source.path / MANIFEST).is_file() or MANIFEST in zip_names(source.path)

    def members(self, folder: Path) -> Members:
        manifest = _manifest((folder / MANIFEST).read_bytes()[: DOCUMENT_BYTES_MAX + 1])
        return Members((MANIFEST, escape(_serialized(manifest))))

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        if source.path.is_dir():
            manifest = _manifest((source.path / MANIFEST).read_bytes()[: DOCUMENT_BYTES_MAX + 1])
            path = source.path / _serialized(manifest)
        else:
            path, manifest = _extract(source)
        return convert_held(source, path, options, _WHAT, _notes(manifest))


def _extract(source: Source) -> tuple[Path, Mapping[str, Any]]:
    """Write the serialized file below `IMPORTED`; returns its path, and the manifest's model."""
    try:
        with zipfile.ZipFile(source.path) as archive:
            entries = archive.infolist()
            for entry in entries:
                _check_name(entry.filename)
            if len(entries) > MEMBERS_MAX or archive.getinfo(MANIFEST).file_size > DOCUMENT_BYTES_MAX:
                raise invalid(f"{_WHAT} has too many files, or a manifest that is too long")
            manifest = _manifest(archive.read(MANIFEST))
            name = _serialized(manifest)
            if name not in archive.namelist():
                raise invalid(f"{_WHAT} names {name[:80]!a}, which it does not have")
            folder = source.folder / IMPORTED / _FOLDER
            folder.mkdir()
            with archive.open(name) as data, (folder / name).open("xb") as file:
                shutil.copyfileobj(data, file)
            return folder / name, manifest
    except (zipfile.BadZipFile, EOFError, struct.error, NotImplementedError, RuntimeError) as error:
        raise invalid(f"{_WHAT} is damaged or cut short: {str(error)[:200]}") from error


def _check_name(name: str) -> None:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not name.isprintable():
        raise invalid(f"{_WHAT} has the member {name[:80]!a}, whose path leads out of it")


def _manifest(content: bytes) -> Mapping[str, Any]:
    document = parse_json(content, MANIFEST, DOCUMENT_BYTES_MAX)
    model = document.get("model") if isinstance(document, dict) else None
    if not isinstance(model, dict):
        raise invalid(f"{MANIFEST} of {_WHAT} cannot be read: it has no object 'model'")
    return model


def _serialized(model: Mapping[str, Any]) -> str:
    name = model.get("serializedFile")
    if model.get("modelFile"):
        raise invalid(
            f"{_WHAT} has a class in Python, {str(model['modelFile'])[:80]!a}, and weights for it: neither says what "
            "is computed; save the model with torch.export.save or torch.jit.save, and push that"
        )
    if not isinstance(name, str) or not name:
        raise invalid(f"{_WHAT} has no serializedFile: its model is made by its handler, which is Python")
    _check_name(name)
    if "/" in name:
        raise invalid(f"{_WHAT} names the serializedFile {name[:80]!a}, which is not a file at its top")
    return name


def _notes(model: Mapping[str, Any]) -> list[str]:
    notes = []
    handler = str(model.get("handler") or "")
    if handler:
        notes.append(
            f"The handler {handler[:80]!a} is Python and does not run here: requests carry the model's tensors, and "
            "replies its outputs."
        )
    if model.get("requirementsFile"):
        notes.append(f"{str(model['requirementsFile'])[:80]!a} is not installed: it is for the handler.")
    if model.get("extraFiles"):
        notes.append("The extra files are kept with the version and not used: they are for the handler.")
    return notes
