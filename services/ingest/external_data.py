"""Finds and verifies the files in which a model keeps its weights ("external data"). The standard library is enough.

Source: ONNX, docs/ExternalData.md: keys location, offset, length of TensorProto.external_data.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from millstream.services.errors import invalid
from millstream.services.model.onnx_file import ExternalTensor, external_tensors

#: limit on the files that hold one model's weights: an archive cannot have more entries
FILES_MAX = 10_000
PATH_BYTES_MAX = 1024


def weights_of(path: Path) -> dict[str, int]:
    """Return the files beside an ONNX file that hold its weights, with the bytes that each must have.

    The weights are not read. None are returned for a file that is no ONNX model: the check says so. Raises
    Failure(INVALID) as `weight_files` does, OSError.
    """
    try:
        return weight_files(external_tensors(path))
    except (ValueError, EOFError):
        return {}


def weight_files(tensors: Iterable[ExternalTensor]) -> dict[str, int]:
    """Return the files that tensors name, with the bytes that each must have.

    Raises Failure(INVALID) for a path that is not below the model's folder, and for too many files.
    """
    ends: dict[str, int] = {}
    for tensor in tensors:
        location, end = _extent(tensor)
        _check_path(location)
        if tensor.external:
            ends[location] = max(end, ends.get(location, 0))
        if len(ends) > FILES_MAX:
            raise invalid(f"the model's weights are in more than {FILES_MAX} files: save them in one")
    return ends


def check_weights(ends: Mapping[str, int], folder: Path) -> None:
    """Raise Failure(INVALID) if a file is missing below `folder`, too short, not regular, or reached through a link."""
    for location, end in ends.items():
        file = folder
        for part in PurePosixPath(location).parts:
            file /= part
            if file.is_symlink():
                raise invalid(f"the model's weights are in {location[:80]!a}, which is a link or in a linked folder")
        check_weight(file, location, end)


def check_weight(file: Path, location: str, end: int) -> None:
    """Raise Failure(INVALID) if the file of weights at `location` is missing, or has less than `end` bytes."""
    if not file.is_file():
        raise invalid(
            f"the model's weights are in {location[:80]!a}, which is missing beside the model{_other_case(file)}"
        )
    if file.stat().st_size < end:
        raise invalid(f"{location[:80]!a} has {file.stat().st_size} bytes, but the model reads up to byte {end}")


def link_files(files: list[str], source: Path, target: Path) -> None:
    """Hard-link `files` of the folder `source` into `target`; copy them where the file system cannot link."""
    for name in files:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source / name, target / name)
        except OSError:
            shutil.copyfile(source / name, target / name)


def _extent(tensor: ExternalTensor) -> tuple[str, int]:
    try:
        offset, length = (int(tensor.entries.get(key, "0")) for key in ("offset", "length"))
    except ValueError:
        raise invalid(f"weight {tensor.name[:80]!r} has an external offset or length that is not a number") from None
    if offset < 0 or length < 0:
        raise invalid(f"weight {tensor.name[:80]!r} has a negative external offset or length")
    return tensor.entries.get("location", ""), offset + length


def _check_path(location: str) -> None:
    path = PurePosixPath(location)
    plain = location.isprintable() and len(location.encode("utf-8", "surrogateescape")) <= PATH_BYTES_MAX
    # ONNX Runtime reads the location "*/_ORT_MEM_ADDR_/*" as an address in its own memory.
    if not location or not plain or path.is_absolute() or ".." in path.parts or "*" in location or "\\" in location:
        raise invalid(f"the model's weights are in {location[:80]!a}, which is not a path below the model's folder")


def _other_case(file: Path) -> str:
    """Return a hint at a file whose name differs in case alone, as copies from other systems have it."""
    try:
        names = [entry.name for entry in file.parent.iterdir() if entry.name.lower() == file.name.lower()]
    except OSError:
        return ""
    return f"; there is {names[0][:80]!a}, whose name differs in case: rename it" if names else ""
