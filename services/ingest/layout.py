"""Recognises the model in a file or folder: what it is and which files belong to it, or why it is none.

file ─> an importer's? ─> known to be something else? ─> an archive, a program, or ONNX with the files of its weights
folder, or the one folder in it ─> Triton's? ─> a format that describes itself ─> ONNX ─> a framework's folder
ONNX: at the top │ onnx/ (Hugging Face's hub), export/ (optimum), 1/ (TensorFlow Serving, SageMaker); of several files
model.onnx is the one to serve; other names are refused, since one would have to be guessed.
`push`, `--preload`, `serve`, unpacked archives and paths in management calls all ask here. Standard library alone:
names are read, and of contents no more than tells what they are. Nothing is executed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from glob import escape
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.external_data import check_weight, weights_of
from millstream.services.ingest.file_kind import why_no_model, why_not_onnx
from millstream.services.ingest.importers import Importer, Members, Source, find_importer
from millstream.services.model.names import FILE

TRITON = "config.pbtxt"
TOKENIZER = "tokenizer.json"
#: kept beside an ONNX file: how its author meant it to be served, and what makes token ids of texts
_KEPT = (TRITON, TOKENIZER)
_NAMES_LOOKED_AT = 2_000
ENTRIES_MAX = 10_000  # of one folder, or of an archive
_PLACES = ("onnx", "export")
_NAMES_SHOWN = 5


class NoModel(Failure):
    """Nothing in a file or folder is a model."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.INVALID, message)


class Found(NamedTuple):
    """A model.

    Args:
        root: the folder that was looked at; of a file, the one that it is in.
        path: the model's file, or the folder that its importer takes.
        importer: of another framework; None: it is served as it is, or is an archive.
        notes: for its owner, one sentence each.
        members: patterns of the files below `path`, if that is a folder.
        kept: names of files that belong to it where they are in its folder, or in one above it below `root`.
        alone: the file itself was named, not its folder.
    """

    root: Path
    path: Path
    importer: Importer | None
    notes: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    alone: bool = False


def recognise(path: Path) -> Found:
    """Return the model in the file or folder at `path`.

    Raises:
        Failure: INVALID with what to do; NoModel if there is nothing of a model.
        OSError: it cannot be read.
    """
    if path.is_dir():
        return _in_folder(path)
    if not path.stat().st_size:
        raise NoModel("the file is empty: was the export or download complete?")
    importer = find_importer(Source(path.parent, path))
    if importer is None and (why := why_not_onnx(path)) is not None:
        raise NoModel(why)
    if path.is_symlink() and not all((path.parent / location).exists() for location in weights_of(path)):
        path = path.resolve()  # its weights are beside what the link leads to
    return Found(path.parent, path, importer, alone=True)


def files_of(found: Found, named: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the files that belong to a model, relative to `found.root`, sorted: nothing else needs to be sent.

    `named`: further ones, which the model's configuration names. Raises Failure(INVALID) for weights that are missing
    or too short; OSError.
    """
    root, path = found.root, found.path
    patterns = [escape(name) for name in named]
    if path.is_dir():
        inside = escape(f"{path.relative_to(root)}/") if path != root else ""
        patterns += [f"{inside}{member}" for member in found.members]
    else:
        patterns.append(escape(str(path.relative_to(root))))
        if found.importer is None:
            beside = path.parent.relative_to(root)
            for location, end in weights_of(path).items():
                check_weight(path.parent / location, location, end)
                patterns.append(escape(str(beside / location)))
            patterns += [escape(str(place / name)) for place in (beside, *beside.parents) for name in found.kept]
    return _matching(root, patterns)


def _matching(root: Path, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return the files below a folder that match, sorted, without hidden ones that are not named.

    Raises Failure(INVALID) for too many.
    """
    names: set[str] = set()
    for pattern in patterns:
        for path in root.glob(pattern):
            name = path.relative_to(root)
            hidden = any(part.startswith(".") for part in name.parts)
            if ".." not in name.parts and not path.is_dir() and (not hidden or escape(str(name)) == pattern):
                names.add(name.as_posix())
            if len(names) > ENTRIES_MAX:
                raise invalid(f"the model has more than {ENTRIES_MAX} files")
    return tuple(sorted(names))


def _in_folder(root: Path) -> Found:
    for folder in dict.fromkeys((root, _only_entry(root))):
        importer = find_importer(Source(root, folder))
        if folder.is_dir() and (importer is None or not importer.runs_code):
            _refuse_triton(folder)
        if importer is not None:
            members = importer.members(folder) or Members(())
            return Found(root, folder, importer, members.notes, tuple(members.patterns))
        onnx = find_onnx(folder) if folder.is_dir() else None
        if onnx is not None:
            if (why := why_not_onnx(onnx.path)) is not None:  # a pointer of Git LFS, for example
                raise invalid(f"{onnx.path.relative_to(folder)}: {why}")
            return Found(root, onnx.path, None, notes_on_others(folder, onnx), kept=_KEPT)
    raise NoModel(_why_none(root))


def _why_none(root: Path) -> str:
    names = list(names_below(root, _NAMES_LOOKED_AT))
    if not names:
        return "it has no files"
    nested = next((name for name in names if name.lower().endswith(".onnx")), None)
    if nested is not None:
        return f"there is none at its top; {nested} is in a folder: push that file, or its folder"
    near = [name for name in names if name.count("/") <= 1]
    why = why_no_model(near)
    if why is not None:
        return f"{next(name for name in near if why_no_model([name]) == why)}: {why}"
    return f"nothing in it is known as one ({shown(near)}): push the model's own file or folder"


def is_repository(folder: Path) -> bool:
    """Return whether a folder has folders of models as Triton has them. Raises OSError, Failure(INVALID)."""
    found = entries(folder)
    if any(entry.name.lower().endswith(".onnx") for entry in found):
        return False
    return any(entry.is_dir() and _is_triton_model(Path(entry.path)) for entry in found)


def _only_entry(folder: Path) -> Path:
    """Return the one file or folder that a folder has; `folder` itself if it has none or several."""
    found = entries(folder)
    return Path(found[0].path) if len(found) == 1 else folder


def _is_triton_model(folder: Path) -> bool:
    return (folder / TRITON).is_file() or bool(version_folders(folder))


def _refuse_triton(folder: Path) -> None:
    """Raise Failure(INVALID) for a model's folder of a Triton repository, and for a repository of such folders."""
    if (folder / TRITON).is_file() and version_folders(folder):
        raise invalid(
            f"this is a model's folder of a Triton repository ({TRITON} and numbered versions): serve it in place, "
            "with its configuration, by `millstream up --triton-repository FOLDER`, where FOLDER is the folder above "
            "it; or push the model file of one version"
        )
    models = [entry.name for entry in entries(folder) if (Path(entry.path) / TRITON).is_file()]
    if len(models) > 1:
        raise invalid(
            f"this is a Triton repository of {len(models)} models ({', '.join(models)[:200]}): serve it in place by "
            "`millstream up --triton-repository FOLDER`, which says of each model what cannot run; or push the model "
            "file of one version"
        )


class OnnxFile(NamedTuple):
    """The ONNX file to serve. `others`: paths below the folder of those that are not served."""

    path: Path
    others: tuple[str, ...] = ()


def find_onnx(folder: Path) -> OnnxFile | None:
    """Return the ONNX file of a folder; None if there is none. Raises Failure(INVALID) for several; OSError."""
    top = [entry.name for entry in entries(folder) if _is_onnx(entry)]
    if top:
        return _chosen(folder, top)
    versions = version_folders(folder)
    found: list[str] = []
    for place in (*_PLACES, *versions[-1:]):
        if (folder / place).is_dir():
            found += [f"{place}/{entry.name}" for entry in entries(folder / place) if _is_onnx(entry)]
    if len({name.partition("/")[0] for name in found}) > 1:
        raise invalid(f"there are ONNX files in several folders ({shown(found)}): push the one to serve")
    if not found:
        return None
    chosen = _chosen(folder, found)
    return chosen._replace(others=(*chosen.others, *(f"{version}/" for version in versions[:-1])))


def notes_on_others(folder: Path, onnx: OnnxFile) -> tuple[str, ...]:
    """Return a note that names the ONNX files of a folder that are not served; none if there are no such files."""
    if not onnx.others:
        return ()
    name = onnx.path.relative_to(folder).as_posix()
    return (f"{name} is served, not {shown(onnx.others)}: push a file by itself to serve it.",)


def version_folders(folder: Path) -> list[str]:
    """Return the names of subfolders that are numbers, the highest last. Raises OSError."""
    names = [entry.name for entry in entries(folder) if entry.name.isdecimal() and entry.name.isascii()]
    return sorted((name for name in names if (folder / name).is_dir()), key=int)


def entries(folder: Path) -> list[os.DirEntry[str]]:
    """Return what a folder has, by name, without hidden entries and those that macOS adds.

    Raises Failure(INVALID) for more than ENTRIES_MAX, OSError.
    """
    with os.scandir(folder) as listing:
        found = list(islice(listing, ENTRIES_MAX + 1))
    if len(found) > ENTRIES_MAX:
        raise invalid(f"{folder.name} has more than {ENTRIES_MAX} entries: it is no model's folder")
    return sorted((one for one in found if not one.name.startswith((".", "__MACOSX"))), key=lambda one: one.name)


def names_below(folder: Path, limit: int) -> Iterator[str]:
    """Yield paths of at most `limit` entries below a folder, those nearer to its top first; links are not followed."""
    left = limit
    pending: list[PurePosixPath] = [PurePosixPath()]
    while pending and left > 0:
        parent = pending.pop(0)
        try:
            with os.scandir(folder / parent) as listing:
                found = sorted((one.name, one.is_dir(follow_symlinks=False)) for one in islice(listing, left))
        except OSError:  # a folder of somebody else
            continue
        left -= len(found)
        for name, is_folder in found:
            if name.startswith((".", "__MACOSX")):
                continue
            yield str(parent / name)
            if is_folder:
                pending.append(parent / name)


def _is_onnx(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(".onnx") and entry.is_file()


def _chosen(folder: Path, names: Sequence[str]) -> OnnxFile:
    """Return the one to serve of several files in one place. Raises Failure(INVALID)."""
    plain = next((name for name in names if PurePosixPath(name).name == FILE), None)
    if plain is None and len(names) > 1:
        raise invalid(
            f"there are {len(names)} ONNX files ({shown(names)}): name the one to serve {FILE}, or push it alone"
        )
    name = plain or names[0]
    return OnnxFile(folder / name, tuple(other for other in names if other != name))


def shown(names: Sequence[str]) -> str:
    """Return the first names, for a message."""
    return ", ".join(names[:_NAMES_SHOWN]) + (", …" if len(names) > _NAMES_SHOWN else "")
