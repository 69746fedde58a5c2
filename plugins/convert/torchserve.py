"""Imports archives of TorchServe (.mar), and the folders that they unpack to.

MAR-INF/MANIFEST.json ─> serializedFile ─> the importer of its content; what cannot run here becomes a note
Source: pytorch/serve, model-archiver/README.md ("Artifact Details").
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from millstream.plugins.convert.base import Imported, Importer, parse_json
from millstream.plugins.convert.held import convert_held
from millstream.services.errors import invalid
from millstream.services.ingest.importers import ImportOptions, Members, Source

MANIFEST = "MAR-INF/MANIFEST.json"
DOCUMENT_BYTES_MAX = 1 << 20
_WHAT = "the TorchServe archive"


class TorchServeImporter(Importer):
    """The importer of what torch-model-archiver wrote, which is unpacked as any archive is."""

    name = "TorchServe"
    described = True
    marks = frozenset({MANIFEST})

    def recognises(self, source: Source) -> bool:
        return (source.path / MANIFEST).is_file()

    def members(self, folder: Path) -> Members:
        """Return all files: a handler may read each."""
        return Members(["**/*"])

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        manifest = _manifest((source.path / MANIFEST).read_bytes()[: DOCUMENT_BYTES_MAX + 1])
        handler = _handler(source.path, manifest)
        if handler and not options.inputs:
            raise invalid(
                f"{_WHAT} answers by its handler {handler[:80]!a}, which is Python: declare the inputs of its model "
                "(--input) to convert that, without the handler"
            )
        return convert_held(source, source.path / _serialized(manifest), options, _WHAT, _notes(manifest))


def _handler(folder: Path, model: Mapping[str, Any]) -> str:
    """Return the handler if its file is in the archive; empty: it is not."""
    name = str(model.get("handler") or "")
    file = PurePosixPath(name.partition(":")[0]).name
    return name if file and (folder / f"{file.removesuffix('.py')}.py").is_file() else ""


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
