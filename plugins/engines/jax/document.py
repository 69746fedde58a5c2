"""Reads the header of a function that jax.export serialized, with the standard library, and refuses what cannot run.

file (FlatBuffers: jax/_src/export/serialization.fbs) ─> Header: versions, platforms, effects, where the program is

The program itself is StableHLO in MLIR's bytecode; `jax_export.jax_program` reads that with JAX.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import NamedTuple

from millstream.services.errors import invalid
from millstream.services.model.flatbuffer import CutShort, NoTable, Table

FORMAT = "jax-export"
PLATFORM = "cpu"
#: numbers of fields of the table `Exported`, which later versions of the schema keep
_VERSION, _NAME, _IN_TREE, _DEVICES_SHORT, _PLATFORMS, _ORDERED, _UNORDERED, _PROGRAM, _DEVICES = (
    0,
    1,
    2,
    6,
    9,
    10,
    11,
    13,
    18,
)
_VERSIONS = range(1, 256)  # of the schema; JAX 0.10 writes 11
_BYTECODE = b"ML\xefR"  # MLIR's magic number


class Header(NamedTuple):
    """What a file says about its function.

    Args:
        name: of the Python function.
        version: of the file's schema.
        platforms: for which it was exported: "cpu", "cuda", "rocm", "tpu".
        effects: number of side effects, such as callbacks to the program that exported it.
        devices: on how many at once it runs.
    """

    name: str
    version: int
    platforms: tuple[str, ...]
    effects: int
    devices: int


def is_export_file(path: Path) -> bool:
    """Return whether the file holds a serialized function, complete or cut short. Raises OSError."""
    try:
        _read(path)
    except NoTable:
        return False
    except CutShort:
        return True
    return True


def read_header(path: Path) -> Header:
    """Return what the file at `path` says.

    Raises Failure(INVALID) with one line if it is damaged or cannot run on the CPU of one machine. OSError.
    """
    try:
        header = _read(path)
    except NoTable:
        raise invalid("this is no function that jax.export serialized") from None
    except CutShort:
        raise invalid("the exported function was cut short: copy or download it again") from None
    if PLATFORM not in header.platforms:
        raise invalid(
            f"the function was exported for {', '.join(header.platforms)[:80]!a} only: export it with "
            "jax.export.export(function, platforms=['cpu', …])"
        )
    if header.effects:
        raise invalid(
            "the function has side effects (callbacks, prints, ordered effects), which cannot be served: export it "
            "without them"
        )
    if header.devices != 1:
        raise invalid(f"the function was exported for {header.devices} devices at once: export it for one")
    return header


def _read(path: Path) -> Header:
    with path.open("rb") as file:
        head = file.read(8)
        if len(head) < 8:
            raise NoTable
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            return _header(Table(view))


def _header(root: Table) -> Header:
    version = root.number(_VERSION, "<H")
    if version not in _VERSIONS or not root.has(_NAME, _IN_TREE, _PLATFORMS, _PROGRAM):
        raise NoTable
    program, size = root.vector(_PROGRAM)
    if not size or root.bytes(program, len(_BYTECODE)) != _BYTECODE:
        raise NoTable
    root.check_end(program + size)
    return Header(
        root.text(_NAME),
        version,
        root.texts(_PLATFORMS),
        root.vector(_ORDERED)[1] + root.vector(_UNORDERED)[1],
        root.number(_DEVICES, "<I") or root.number(_DEVICES_SHORT, "<H"),
    )
