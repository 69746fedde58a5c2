"""labels: class names from text files of a version, one name a line."""

from __future__ import annotations

from pathlib import Path

from millstream.services.errors import Failure, invalid
from millstream.services.model.manifest import Manifest
from millstream.services.model.version_files import overwritten, read_label_names

Labels = dict[str, tuple[str, ...]]


def read_labels(folder: Path, manifest: Manifest) -> Labels:
    """Return the class names of each output of the version in `folder`.

    Raises:
        Failure: INVALID for a file that is not in the version's list, cannot be read, or was changed.
    """
    try:
        names = {path: read_label_names(folder, path, manifest.files) for path in set(manifest.config.labels.values())}
    except Failure as failure:
        raise invalid(failure.message + overwritten(manifest)) from None
    return {output: names[path] for output, path in manifest.config.labels.items()}
