"""labels: the names of classes that lie in text files beside a version, one a line."""

from __future__ import annotations

from pathlib import Path

from services.errors import Code, Failure
from services.manifest import Manifest

LABEL_BYTES_MAX = 8 << 20  # of one file

Labels = dict[str, tuple[str, ...]]


def read_labels(folder: Path, manifest: Manifest) -> Labels:
    """Class names by output, of the version in `folder`. Raises Failure(MODEL) for a file that cannot be read."""
    return {output: _read(folder / path) for output, path in manifest.config.labels.items()}


def _read(path: Path) -> tuple[str, ...]:
    try:
        with path.open("rb") as file:
            content = file.read(LABEL_BYTES_MAX + 1)
        if len(content) > LABEL_BYTES_MAX:
            raise Failure(Code.MODEL, f"the labels in {path.name} are more than {LABEL_BYTES_MAX} bytes")
        return tuple(line.strip() for line in content.decode().splitlines())
    except (OSError, UnicodeDecodeError) as error:
        raise Failure(Code.MODEL, f"the labels in {path.name} cannot be read: {error}") from error
