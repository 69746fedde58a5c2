"""Finds and verifies the files in which a model keeps its weights ("external data").

Imported by the checker process only.

Source: ONNX, docs/ExternalData.md: keys location, offset, length of TensorProto.external_data.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path, PurePosixPath

import onnx

from millstream.services.errors import invalid
from millstream.services.ingest.archive import ENTRIES_MAX, PATH_BYTES_MAX
from millstream.services.ingest.graph import tensors

#: limit on the files that hold one model's weights: an archive cannot have more entries
FILES_MAX = ENTRIES_MAX


def external_files(model: onnx.ModelProto, folder: Path, *, archived: bool) -> list[str]:
    """Return the sorted paths, relative to `folder`, of the files that hold the model's weights.

    `archived` says whether other files came with the model; if not, a model with external weights is rejected.
    Raises Failure(INVALID) if a file is missing, outside `folder`, or too short.
    """
    ends: dict[str, int] = {}
    for tensor in tensors(model):
        external = tensor.data_location == onnx.TensorProto.EXTERNAL
        if external or tensor.external_data:
            location, end = _extent(tensor)
            _check_path(location)
            if external:
                ends[location] = max(end, ends.get(location, 0))
    if len(ends) > FILES_MAX:
        raise invalid(f"the model's weights are in more than {FILES_MAX} files: save them in one")
    if ends and not archived:
        names = ", ".join(ascii(location) for location in sorted(ends)[:3])
        raise invalid(f"the model's weights are in other files ({names}): upload a zip or tar of the model and these")
    for location, end in ends.items():
        _check_file(folder, location, end)
    return sorted(ends)


def link_files(files: list[str], source: Path, target: Path) -> None:
    """Hard-link `files` of the folder `source` into `target`; copy them where the file system cannot link."""
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target / name)
        except OSError:
            shutil.copyfile(source / name, target / name)


def _extent(tensor: onnx.TensorProto) -> tuple[str, int]:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        offset, length = (int(entries.get(key, "0")) for key in ("offset", "length"))
    except ValueError:
        raise invalid(f"weight {tensor.name[:80]!r} has an external offset or length that is not a number") from None
    if offset < 0 or length < 0:
        raise invalid(f"weight {tensor.name[:80]!r} has a negative external offset or length")
    return entries.get("location", ""), offset + length


def _check_path(location: str) -> None:
    path = PurePosixPath(location)
    plain = location.isprintable() and len(location.encode()) <= PATH_BYTES_MAX
    # ONNX Runtime reads the location "*/_ORT_MEM_ADDR_/*" as an address in its own memory.
    if not location or not plain or path.is_absolute() or ".." in path.parts or "*" in location or "\\" in location:
        raise invalid(f"the model's weights are in {location[:80]!a}, which is not a path inside the archive")


def _check_file(folder: Path, location: str, end: int) -> None:
    """Raise Failure(INVALID) for a file that is missing, too short, not regular, or reached through a link."""
    file = folder
    for part in PurePosixPath(location).parts:
        file /= part
        if file.is_symlink():
            raise invalid(f"the model's weights are in {location[:80]!a}, which is a link or in a linked folder")
    if not file.is_file():
        raise invalid(f"the model's weights are in {location[:80]!a}, which is not in the archive")
    if file.stat().st_size < end:
        raise invalid(f"{location[:80]!a} has {file.stat().st_size} bytes, but the model reads up to byte {end}")
