"""Reads .npz files that anybody may have written: bounded before they are unpacked, without pickles, one kind of error.

An .npz file is a zip archive of .npy files: each layer has errors of its own, from zlib's to those of Python's grammar.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

Array = np.ndarray[Any, Any]


class NpzError(ValueError):
    """The file is no .npz file of arrays; says why."""


class TooLargeError(ValueError):
    """Its arrays are too many, or too large together; says by how much."""


def read_npz(
    file: Path | IO[bytes], bytes_max: int, arrays_max: int, wanted: Callable[[str], bool] = lambda _: True
) -> dict[str, Array]:
    """Return the arrays of a file by name.

    Args:
        file: a path, or a file that can be read from its beginning again.
        bytes_max: of all arrays, unpacked.
        arrays_max: how many.
        wanted: whether an array is read, by its name.

    Raises NpzError, TooLargeError, and OSError if the file itself cannot be read.
    """
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return read_npz(opened, bytes_max, arrays_max, wanted)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
        if len(entries) > arrays_max:
            raise TooLargeError(f"{len(entries)} arrays, more than {arrays_max}")
        if sum(entry.file_size for entry in entries) > bytes_max:
            raise TooLargeError(f"the arrays take more than {bytes_max >> 20} MiB")
        file.seek(0)
        with np.load(file, allow_pickle=False) as loaded:
            arrays = {name: loaded[name] for name in loaded.files if wanted(name)}
    except TooLargeError:
        raise
    except Exception as error:
        raise NpzError((str(error) or type(error).__name__)[:200]) from error
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):  # numpy returns the bytes of an entry that is no .npy file
            raise NpzError(f"{name[:100]!r} is no array")
    return arrays
