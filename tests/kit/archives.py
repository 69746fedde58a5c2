"""Archives of TorchServe, as its torch-model-archiver writes them."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path


def mar(path: Path, model: Mapping[str, str], files: Mapping[str, bytes | str]) -> Path:
    """Write an archive with a manifest that describes `model`, and return its path."""
    manifest = {"createdOn": "22/11/2026 12:00:00", "runtime": "python", "model": model, "archiverVersion": "0.12.0"}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**files, "MAR-INF/MANIFEST.json": json.dumps(manifest)}.items():
            archive.writestr(name, content)
    return path
