"""The source of the release before this one, from the history of the repository. Standard library only."""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: the last commit whose keys in Redis have no protocol number
COMMIT = "8ec0ecb"


def available() -> bool:
    """Whether there is git, and the history goes back that far: a tarball of the source has none."""
    if shutil.which("git") is None:
        return False
    return (
        subprocess.run(_git("cat-file", "-e", f"{COMMIT}^{{commit}}"), capture_output=True, check=False).returncode == 0
    )


def unpack(folder: Path) -> Path:
    """Write the programs of that release to `folder`; returns it."""
    packed = subprocess.run(_git("archive", COMMIT, "gateway", "workers", "services"), capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


def _git(*words: str) -> list[str]:
    return ["git", "-C", str(ROOT), *words]
