"""Variants: what a device compiles from a version, made once and loaded from there afterwards.

<root>/models/<model>/<version>/compiled/<target>-<key>/report.json   Report: what it was made from and for, and by whom
<root>/models/<model>/<version>/compiled/<target>-<key>/…             the files that it names

The key is a digest of the version's content, the target, the library's version and the device. A folder is written
under another name and renamed. It is a cache: a damaged one or one of another device is not loaded, and made again; it
goes with its version.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import ENOENT
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from millstream.services.model.manifest import Manifest, SourceFile
from millstream.services.model.version_files import describe_file
from millstream.services.repository.disk import fsync_tree, read_file, storage_errors
from millstream.services.repository.documents import content_digest

log = logging.getLogger("millstream.variants")

REPORT = "report.json"
REPORT_BYTES_MAX = 1 << 20  # a larger one counts as damaged
VARIANTS_MAX = 4  # of one version; beyond, the one that was made first is deleted
FILES_MAX = 64  # of one variant
ABANDONED_S = 3600.0  # age of an unfinished folder whose process must have died
_NEW = ".new-"


class Target(NamedTuple):
    """What a variant is compiled for.

    Args:
        name: backend and kind of device, like "openvino-cpu".
        runtime: name and version of the library.
        device: fingerprint of the device: a variant may be wrong, or refused, on another one.
    """

    name: str
    runtime: str
    device: str


class Report(BaseModel):
    """The document of a variant.

    Args:
        files: the first is the one to load; empty: the variant was refused.
        refused: why it is not used, for example because its outputs differ; it is not made again.
        seconds: that it took to compile.
        flags: options that it was compiled with.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int = 1
    digest: str
    target: str
    runtime: str
    device: str
    files: tuple[SourceFile, ...] = Field((), max_length=FILES_MAX)
    refused: str = ""
    seconds: float = 0.0
    flags: dict[str, str] = {}


class Variants:
    """The variants of a repository's versions. Safe for several threads and processes.

    Args:
        models: the repository's folder of models.
    """

    def __init__(self, models: Path) -> None:
        self._models = models

    def compiled(self, manifest: Manifest) -> Path:
        """Return the folder of everything that is compiled from a version."""
        return self._models / manifest.model / str(manifest.version) / "compiled"

    def beside(self, name: str) -> Iterator[Path]:
        """Yield the folders of a name beside those of what was compiled, of all versions."""
        return self._models.glob(f"*/*/{name}")

    def folder(self, manifest: Manifest, target: Target) -> Path:
        """Return where the variant of a version for a target is, or would be."""
        key = hashlib.sha256("\0".join((content_digest(manifest), *target)).encode()).hexdigest()
        return self.compiled(manifest) / f"{target.name}-{key[:16]}"

    def report(self, manifest: Manifest, target: Target) -> Report | None:
        """Return the report of a variant; None if there is none, or it is damaged or of something else."""
        path = self.folder(manifest, target) / REPORT
        try:
            report = Report.model_validate_json(read_file(path, REPORT_BYTES_MAX))
        except (OSError, ValueError):
            return None
        made_for = (report.digest, report.target, report.runtime, report.device)
        return report if made_for == (content_digest(manifest), *target) else None

    def reports(self, manifest: Manifest) -> dict[str, Report]:
        """Return the readable reports of a version's variants by the names of their folders, engines included."""
        found: dict[str, Report] = {}
        for path in sorted(self.compiled(manifest).glob(f"[!.]*/{REPORT}")):
            with suppress(OSError, ValueError):
                found[path.parent.name] = Report.model_validate_json(read_file(path, REPORT_BYTES_MAX))
        return found

    def find(self, manifest: Manifest, target: Target) -> Path | None:
        """Return the file to load, if there is a variant and all its files have their digests; else None.

        A damaged variant is deleted, so that it is made again.
        """
        report, folder = self.report(manifest, target), self.folder(manifest, target)
        if report is None:
            if folder.exists():
                self.discard(manifest, target, "its report is damaged")
            return None
        if not report.files:
            return None
        for file in report.files:
            try:
                if Path(file.path).name != file.path:
                    raise FileNotFoundError(ENOENT, "it is not in the variant's folder")
                found = describe_file(folder, file.path)
            except OSError as error:
                self.discard(manifest, target, f"{file.path}: {error.strerror}")
                return None
            if found.sha256 != file.sha256:
                self.discard(manifest, target, f"{file.path} is damaged")
                return None
        return folder / report.files[0].path

    def discard(self, manifest: Manifest, target: Target, why: str) -> None:
        """Delete a variant that cannot be used, so that it is made again."""
        log.warning("the variant %s of %s is deleted: %s", target.name, manifest.content_id, why)
        with suppress(OSError):
            rmtree(self.folder(manifest, target))

    @contextmanager
    def making(self, manifest: Manifest) -> Iterator[Path]:
        """Yield an empty folder for a new variant, which is deleted at the end unless `keep` has taken it.

        Raises Failure(STORAGE), Failure(NOT_FOUND) if the version was deleted.
        """
        with storage_errors(self._models):
            compiled = self.compiled(manifest)
            compiled.mkdir(exist_ok=True)  # its parent must be there: the version may have been deleted
            folder = Path(tempfile.mkdtemp(prefix=_NEW, dir=compiled))
            _remove_abandoned(compiled, folder)
        try:
            yield folder
        finally:
            rmtree(folder, ignore_errors=True)

    def keep(self, manifest: Manifest, target: Target, folder: Path, made: Report) -> bool:
        """Publish a folder of `making`; False if another process was faster. Deletes the oldest beyond the limit.

        The digests of `made.files` are taken from the files. Raises Failure(STORAGE).
        """
        with storage_errors(self._models):
            files = tuple(describe_file(folder, file.path) for file in made.files)
            report = made.model_copy(
                update={
                    "files": files,
                    "digest": content_digest(manifest),
                    "target": target.name,
                    "runtime": target.runtime,
                    "device": target.device,
                }
            )
            (folder / REPORT).write_text(report.model_dump_json(indent=1))
            fsync_tree(folder)
            try:
                folder.rename(self.folder(manifest, target))
            except OSError:  # it is there already, and not empty
                if self.report(manifest, target) is None:
                    raise
                return False
        self._bound(self.compiled(manifest), self.folder(manifest, target))
        return True

    def _bound(self, compiled: Path, newest: Path) -> None:
        """Delete the oldest variants of a version, of other devices or library versions, beyond VARIANTS_MAX."""
        others = [path.parent for path in compiled.glob(f"*/{REPORT}") if path.parent != newest]
        with suppress(OSError):  # another worker deletes, too
            others.sort(key=lambda folder: folder.stat().st_mtime)
        for folder in others[: max(0, len(others) + 1 - VARIANTS_MAX)]:
            if not folder.name.startswith(_NEW):
                rmtree(folder, ignore_errors=True)


def _remove_abandoned(compiled: Path, newest: Path) -> None:
    """Delete unfinished folders of processes that were killed. Ages are of the file system's own clock."""
    now = newest.stat().st_mtime
    for folder in compiled.glob(f"{_NEW}*"):
        with suppress(OSError):
            if now - folder.stat().st_mtime > ABANDONED_S:
                rmtree(folder)
