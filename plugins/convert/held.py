"""Imports the model that another server's archive or folder holds, with the importer of its content.

path inside ─> an importer recognises it? ─yes─> converted; the notes of the outer format come first
                                          └─no──> ONNX? ─> served as it is, its samples answered by ONNX Runtime
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from glob import escape
from importlib.util import find_spec
from pathlib import Path

from millstream.plugins.convert.base import Imported, Importer
from millstream.plugins.convert.drawn_samples import ModelInput, draw_samples
from millstream.services.errors import invalid
from millstream.services.ingest.importers import IMPORTED, ImportOptions, Members, Source, find_importer

#: names of the importers of formats that hold others: none holds another
ONNX_FILE = "model.onnx"
OUTER = frozenset({"TorchServe", "MLServer", "TensorFlow Serving"})
NOTES_MAX = 15  # of the outer format; an import has 16


def convert_held(source: Source, path: Path, options: ImportOptions, what: str, notes: Sequence[str] = ()) -> Imported:
    """Import the file or folder at `path`, which `source` holds.

    Args:
        source: the upload.
        path: what the outer format serves, below `source.folder`.
        options: of the upload.
        what: the outer format, for messages: "the TorchServe archive".
        notes: remarks on the outer format.

    Raises Failure(INVALID).
    """
    from millstream.services.ingest.file_kind import why_not_onnx

    if not path.exists():
        raise invalid(f"{what} names {path.name[:80]!a}, which it does not have")
    importer = importer_of(source, path, what)
    if importer is not None:
        imported = importer.convert(Source(source.folder, path), options)
        return imported._replace(notes=(*notes[:NOTES_MAX], *imported.notes))
    if path.is_dir():
        found = path / ONNX_FILE
        if not found.is_file():
            raise invalid(f"{what} holds no model that runs here: {path.name[:80]!a} is a folder of nothing known")
        path = found
    why = why_not_onnx(path)
    if why is not None:
        raise invalid(f"{what} holds {path.name[:80]!a}: {why}")
    return import_onnx(source, path, notes)


def importer_of(source: Source, path: Path, what: str) -> Importer | None:
    """Return the importer of the file or folder at `path`, which `what` holds; None: it is ONNX, or nothing known.

    Raises Failure(INVALID) with what to install if its framework is missing.
    """
    importer = find_importer(Source(source.folder, path), without=OUTER)
    if not isinstance(importer, Importer):
        return None
    if missing := [module for module in importer.modules if find_spec(module) is None]:
        raise invalid(
            f"{what} holds a {importer.name} model, whose import needs {', '.join(missing)}: "
            f"pip install 'millstream[{importer.extra}]' where the gateway runs"
        )
    return importer


def held_members(folder: Path, path: Path) -> Members:
    """Return the files of the model at `path`, which a folder holds, as patterns below the folder. Raises Failure."""
    from millstream.services.ingest.external_data import weights_of

    importer = find_importer(Source(folder, path), without=OUTER)
    place = path if path.is_dir() else path.parent
    below = "" if place == folder else f"{escape(place.relative_to(folder).as_posix())}/"
    if path.is_file():
        return Members([below + escape(name) for name in (path.name, *([] if importer else weights_of(path)))])
    members = importer.members(path) if importer is not None else None
    if members is not None:
        return members._replace(patterns=[below + pattern for pattern in members.patterns])
    return Members([below + escape(name) for name in (ONNX_FILE, *weights_of(path / ONNX_FILE))])


def import_onnx(source: Source, path: Path, notes: Sequence[str]) -> Imported:
    """Return a copy of an ONNX file, mended as an upload of it is, whose samples ONNX Runtime answers.

    There is nothing to compare it with but itself, before it is rewritten. Raises Failure(INVALID).
    """
    import onnxruntime

    from millstream.services.ingest.external_data import check_weights, weight_files
    from millstream.services.ingest.graph import read_model, stored_outside
    from millstream.services.ingest.import_check import by_name
    from millstream.services.ingest.mending import mend
    from millstream.services.ingest.model_io import read_tensors
    from millstream.services.ingest.trial_session import Session

    model = read_model(path)
    weights = weight_files(stored_outside(model))
    check_weights(weights, path.parent)
    mends = mend(model)
    target = source.folder / IMPORTED
    target.mkdir(exist_ok=True)
    for name in weights:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path.parent / name, target / name)
    served = target / ONNX_FILE
    served.write_bytes(model.SerializeToString())
    inputs, outputs = read_tensors(model)
    session = Session(served, inputs, outputs)
    given = [ModelInput(tensor.name, tensor.datatype, tensor.dims) for tensor in inputs]
    samples = draw_samples(given, lambda arrays: by_name(outputs, session.run(arrays)))
    versions = f"{model.producer_name} {model.producer_version}".strip() or "ONNX"
    made = f"{versions[:100]}, onnxruntime {onnxruntime.__version__}"
    files = [target / name for name in weights]
    return Imported(served, "onnx", samples, made, (*notes, *mends.notes), files=files)
