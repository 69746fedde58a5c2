"""Checks names of models and pools, version numbers, and paths below a model's folder. Pure."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from millstream.services.errors import Subject, invalid

NAME_CHARACTERS_MAX = 128
VERSION_MAX = 2**31 - 1
NAME_RULE = (
    f"use 1 to {NAME_CHARACTERS_MAX} letters, digits, '.', '_' or '-', starting with a letter or digit and not ending "
    "with '.'"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")
PATH_CHARACTERS_MAX = 512
COMPONENT_BYTES_MAX = 255
FILE = "model.onnx"
FOREIGN_FILE = "model"  # an uploaded file of another framework
WARMUP = "warmup"
_VERSION_FOLDER = re.compile(r"[1-9][0-9]{0,9}", re.ASCII)


def check_name(name: str, what: str = "model name") -> str:
    """Return `name` if it is a valid name for a model or pool. Raises Failure(INVALID).

    A valid name is one path component that is safe on every file system and object store.
    """
    if not isinstance(name, str):
        raise invalid(f"a {what} is text, not a value of type {type(name).__name__}")
    if len(name) > NAME_CHARACTERS_MAX or not _NAME.match(name) or name.endswith("."):
        raise invalid(f"{what} {name[:80]!r} is not allowed: {NAME_RULE}")
    return name


def check_version(version: int) -> int:
    """Return `version` if it is a whole number from 1 to 2^31 - 1. Raises Failure(INVALID)."""
    if not 1 <= version <= VERSION_MAX:
        raise invalid(f"version {version} is not allowed: use a whole number from 1 to {VERSION_MAX}", Subject.VERSION)
    return version


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
    return _VERSION_FOLDER.fullmatch(name) is not None
