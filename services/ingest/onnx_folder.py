"""Finds the ONNX file of a folder: at its top, or where exporters and servers put it.

model.onnx, any.onnx ─> at the top │ onnx/ (Hugging Face's hub), export/ (optimum), 1/ (TensorFlow Serving, SageMaker)
of several files model.onnx is the one to serve; other names are refused, since one would have to be guessed
Standard library alone; names are read, no content.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from millstream.services.errors import invalid
from millstream.services.model.paths import FILE

ENTRIES_MAX = 10_000  # of one folder, or of an archive
_PLACES = ("onnx", "export")
_NAMES_SHOWN = 5


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
