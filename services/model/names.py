"""Checks names of models and pools, and version numbers. Pure."""

from __future__ import annotations

import re

from millstream.services.errors import Subject, invalid

NAME_CHARACTERS_MAX = 128
VERSION_MAX = 2**31 - 1
NAME_RULE = (
    f"use 1 to {NAME_CHARACTERS_MAX} letters, digits, '.', '_' or '-', starting with a letter or digit and not ending "
    "with '.'"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\Z")


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
