"""Weights kept in files beside the model ("external data"). Imported by the checker process only.

Source: ONNX, docs/ExternalData.md: keys location, offset, length of TensorProto.external_data.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path, PurePosixPath

import onnx

from services.compiler.graph import tensors
from services.errors import invalid


def external_files(model: onnx.ModelProto, folder: Path, *, archived: bool) -> list[str]:
    """Paths, below `folder`, of the files that hold the model's weights, sorted.

    Raises Failure(INVALID): the files did not come with the model, lie outside `folder`, or are too short.
    """
    ends: dict[str, int] = {}
    for tensor in tensors(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            location, end = _extent(tensor)
            ends[location] = max(end, ends.get(location, 0))
    if ends and not archived:
        shown = ", ".join(ascii(location) for location in sorted(ends)[:3])
        raise invalid(f"the model's weights are in other files ({shown}): upload a zip or tar of the model and these")
    for location, end in ends.items():
        _check_file(folder, location, end)
    return sorted(ends)


def link_files(files: list[str], source: Path, target: Path) -> None:
    """Make `files` of the folder `source` available in `target` too, without a copy where the disk can do that."""
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target / name)
        except OSError:
            shutil.copyfile(source / name, target / name)


def _extent(tensor: onnx.TensorProto) -> tuple[str, int]:
    entries = {entry.key: entry.value for entry in tensor.external_data}
    try:
        return entries.get("location", ""), int(entries.get("offset", "0")) + int(entries.get("length", "0"))
    except ValueError:
        raise invalid(f"weight {tensor.name[:80]!r} has an external offset or length that is no number") from None


def _check_file(folder: Path, location: str, end: int) -> None:
    path = PurePosixPath(location)
    # ONNX Runtime takes "*/_ORT_MEM_ADDR_/*" for an address in its own memory.
    if not location or path.is_absolute() or ".." in path.parts or "\\" in location or "*" in location:
        raise invalid(f"the model's weights are in {location[:80]!a}, which is not a path inside the archive")
    file = folder / path
    if not file.is_file():
        raise invalid(f"the model's weights are in {location[:80]!a}, which is not in the archive")
    if file.stat().st_size < end:
        raise invalid(f"{location[:80]!a} has {file.stat().st_size} bytes, but the model reads up to byte {end}")
