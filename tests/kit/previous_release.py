"""The source of the release before this one, taken from git into build/releases, where tests run its processes.

The newest tag v… before HEAD is that release; without a tag, the commit in deploy/previous-release.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "deploy" / "previous-release"
FOLDERS = ("src", "gateway", "services", "workers", "plugins", "client", "examples")
GIT_S_MAX = 120


class Release(NamedTuple):
    """A release. `tree`: what PYTHONPATH names; `version`: what its processes say that they are."""

    name: str
    tree: Path
    version: str
    protocol: int


def previous_release(repository: Path = ROOT, releases: Path = ROOT / "build" / "releases") -> Release:
    """Return the previous release, extracted on first use. Raises AssertionError in a checkout without history."""
    name = _newest_tag(repository) or RECORDED.read_text().strip()
    found = _git(repository, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    if found.returncode:
        raise AssertionError(
            f"this checkout has no commit {name}, the previous release: `git fetch --unshallow --tags` gets it"
        )
    commit = found.stdout.decode().strip()
    folder = releases / commit
    if not folder.exists():
        _extract(repository, commit, folder)
    protocol = _number(folder / "services" / "queue" / "keys.py", r"^PROTOCOL = (\d+)$")
    version = _number(folder / "services" / "version.py", r'^VERSION = "([^"]+)"$')
    return Release(name, folder / "src", version, int(protocol))


def _newest_tag(repository: Path) -> str | None:
    found = _git(repository, "describe", "--tags", "--abbrev=0", "--match", "v*", "HEAD^")
    return found.stdout.decode().strip() or None


def _extract(repository: Path, commit: str, folder: Path) -> None:
    """Write the packages of a commit to a folder. Test processes may do so at the same time: the first one wins."""
    listed = _git(repository, "ls-tree", "--name-only", commit).stdout.decode().split()
    archive = _git(repository, "archive", "--format=tar", commit, *(name for name in FOLDERS if name in listed))
    assert archive.returncode == 0, archive.stderr.decode()
    folder.parent.mkdir(parents=True, exist_ok=True)
    written = Path(tempfile.mkdtemp(dir=folder.parent))
    try:
        with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as members:
            members.extractall(written, filter="tar")
        _name_release(written / "services" / "version.py", commit)
        try:
            written.rename(folder)
        except OSError:
            assert folder.is_dir(), folder
    finally:
        shutil.rmtree(written, ignore_errors=True)


def _name_release(path: Path, commit: str) -> None:
    """Add the commit to the version that its processes show, which between two releases would be ours."""
    path.write_text(re.sub(r'^(VERSION = "[^"]+)"$', rf'\1+{commit[:8]}"', path.read_text(), flags=re.MULTILINE))


def _number(path: Path, pattern: str) -> str:
    found = re.search(pattern, path.read_text(), re.MULTILINE)
    assert found, f"{path} has no line {pattern}"
    return found[1]


def _git(repository: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    command = ["git", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, timeout=GIT_S_MAX, check=False)
