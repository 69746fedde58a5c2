"""Checks paths that a configuration names: they must stay below the model's folder. Pure."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from millstream.services.errors import invalid

PATH_CHARACTERS_MAX = 512
COMPONENT_BYTES_MAX = 255
FILE = "model.onnx"
FOREIGN_FILE = "model"  # an uploaded file of another framework
WARMUP = "warmup"
_VERSION = re.compile(r"[1-9][0-9]{0,9}", re.ASCII)


def plain_path(path: str, what: str) -> str:
    """Return `path` if it stays below the folder that it is relative to. Raises Failure(INVALID).

    Args:
        path: relative path with "/" as separator.
        what: what the file is for; begins the error message.
    """
    pure = PurePosixPath(path)
    safe = path.isprintable() and "\\" not in path and len(path) <= PATH_CHARACTERS_MAX
    if any(len(part.encode()) > COMPONENT_BYTES_MAX for part in pure.parts if safe):
        raise invalid(f"{what} {path[:80]!a} has a name that is too long")
    if not path or not safe or pure.is_absolute() or ".." in pure.parts or str(pure) != path or path == ".":
        raise invalid(f"{what} {path[:80]!a} is not a path below the model's folder")
    return path


def is_version(name: str) -> bool:
    """Return whether a folder with this name contains a version: 1 to 10 digits, the first not 0."""
    return _VERSION.fullmatch(name) is not None
