"""Sizes and digests of a version's files."""

from __future__ import annotations

import hashlib
from pathlib import Path

from millstream.services.model.manifest import SourceFile
from millstream.services.model.version_files import open_regular


def describe_file(folder: Path, path: str) -> SourceFile:
    """Return the size and sha256 of the file at `path` below `folder`. Raises OSError."""
    with open_regular(folder / path) as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        size_bytes = content.tell()
    return SourceFile(path=path, size_bytes=size_bytes, sha256=digest)
