"""Recognises a model in OpenVINO's own format: an XML document, with its weights beside it."""

from __future__ import annotations

from pathlib import Path

_HEAD_BYTES = 4096


def is_model_file(path: Path) -> bool:
    """Return whether the file is the document of a model. Raises OSError."""
    if path.suffix != ".xml":
        return False
    with path.open("rb") as file:
        return b"<net " in file.read(_HEAD_BYTES)
