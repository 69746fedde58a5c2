"""Choices: which compiled forms of a version serve on a kind of device, and for which numbers of rows.

<root>/models/<model>/<version>/compiled/choice-<key>.json   Choice; no file: the version's own file serves
<root>/models/<model>/<version>/compiled/race-<key>/…        the folders of the candidates that a choice names

The key is a digest of the version's content, the kind of worker and its device. A race writes a choice, an undo deletes
it; workers follow. A choice of other content, or whose files are damaged, is not followed.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from millstream.plugins.compile.candidate import Bounds
from millstream.plugins.compile.race.report import Gate
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest, SourceFile
from millstream.services.model.version_files import describe_file
from millstream.services.repository.disk import read_file, replace_file, storage_errors
from millstream.services.repository.verdicts import content_digest

log = logging.getLogger("millstream.races")

FORMAT = 2  # forms of documents with another number had less to prove, and serve only after another race
DOCUMENT_BYTES_MAX = 1 << 20  # a larger one counts as damaged
FILES_MAX = 256  # of one variant
ROWS_MAX = 64  # entries of a table
BASELINE = "baseline"  # the version's own file, in a table; as in services.compiler.race.report


class ChosenVariant(BaseModel):
    """A candidate that serves.

    Args:
        folder: below the version's `compiled` folder; "" for the version's own files.
        files: with digests; the first is the one to load. Empty: the version's own file, with other options.
        backend: the library that loads it.
        runtime: name and version of that library: another version may refuse it, or compute something else.
        single: its rows influence each other, so it serves runs of one row only.
        lossy: its answers differ beyond rounding, within the gate's limits.
        bounds: of inputs; the version's own file runs batches with others.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    key: str
    target: str
    folder: str = ""
    files: tuple[SourceFile, ...] = Field((), max_length=FILES_MAX)
    backend: str
    options: dict[str, str | int | float | bool] = {}
    runtime: str = ""
    single: bool = False
    lossy: bool = False
    bounds: Bounds = {}


class Choice(BaseModel):
    """The compiled forms that serve a version on a kind of device.

    Args:
        table: most rows of a run -> key of the variant that runs it, or BASELINE; the last entry has all larger runs.
        ratio: times as fast as the baseline, as the race measured it.
        gate: that its variants passed.
        raced_at: instant of the verdict, in seconds since the epoch; tells two choices apart.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int = FORMAT
    content: str
    kind: str
    device: str
    table: dict[int, str] = Field(min_length=1, max_length=ROWS_MAX)
    variants: tuple[ChosenVariant, ...]
    ratio: float = 1.0
    gate: Gate = Gate()
    raced_at: float = 0.0

    @model_validator(mode="after")
    def _names_its_variants(self) -> Self:
        keys = {variant.key for variant in self.variants}
        if (
            not keys
            or len(keys) != len(self.variants)
            or BASELINE in keys
            or set(self.table.values()) - {BASELINE} != keys
        ):
            raise ValueError("its table does not name its variants")
        if min(self.table) < 1:
            raise ValueError("its table has runs of less than one row")
        return self

    @property
    def names(self) -> str:
        """The targets of its variants, for people."""
        return ", ".join(dict.fromkeys(variant.target for variant in self.variants))


class Choices:
    """The choices of a repository's versions. Safe for several threads and processes.

    Args:
        models: the repository's folder of models.
    """

    def __init__(self, models: Path) -> None:
        self._models = models
        self._damaged: dict[Path, tuple[int, int, int]] = {}  # documents of which the log says so -> their stamps

    def compiled(self, manifest: Manifest) -> Path:
        """Return the folder of everything that is compiled from a version."""
        return self._models / manifest.model / str(manifest.version) / "compiled"

    def cache(self, manifest: Manifest, kind: str, device: str) -> Path:
        """Return the folder in which the candidates of a race are compiled; a later race finds them there."""
        return self.compiled(manifest) / f"race-{_key(manifest, kind, device)}"

    def make_cache(self, manifest: Manifest, kind: str, device: str) -> Path:
        """Return the folder of `cache`, which is created if missing. Raises Failure(STORAGE, INTERNAL, NOT_FOUND)."""
        folder = self.cache(manifest, kind, device)
        self._make_compiled(manifest)
        with storage_errors(self._models):
            folder.mkdir(exist_ok=True)
        return folder

    def get(self, manifest: Manifest, kind: str, device: str) -> Choice | None:
        """Return the choice; None: there is none, or it is damaged or of other content."""
        path = self._path(manifest, kind, device)
        try:
            about = path.stat()
        except OSError:
            return None
        stamp = (about.st_ino, about.st_mtime_ns, about.st_size)
        try:
            choice = Choice.model_validate_json(read_file(path, DOCUMENT_BYTES_MAX))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            why = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
            if self._damaged.get(path) != stamp:  # workers ask twice a second
                self._damaged[path] = stamp
                log.warning("%s is damaged and is not followed: %s", path, why)
            return None
        made_for = (choice.content, choice.kind, choice.device, choice.format)
        return choice if made_for == (content_digest(manifest), kind, device, FORMAT) else None

    def write(self, manifest: Manifest, choice: Choice) -> None:
        """Store a choice. The caller has the lock of the race. Raises Failure(STORAGE, INTERNAL, NOT_FOUND)."""
        path = self._path(manifest, choice.kind, choice.device)
        self._make_compiled(manifest)
        with storage_errors(self._models):
            replace_file(path, choice.model_dump_json(indent=1).encode() + b"\n")

    def remove(self, manifest: Manifest, kind: str, device: str) -> bool:
        """Delete a choice: the version's own file serves again. False: there was none."""
        path = self._path(manifest, kind, device)
        try:
            path.unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise Failure(Code.INTERNAL, f"cannot delete {path}: {error.strerror}") from error
        return True

    def sweep(self, manifest: Manifest, kind: str, device: str, kept: Collection[str]) -> None:
        """Delete the candidates' folders of a race except the `kept` ones, by their names below the race's folder."""
        with suppress(OSError):
            for path in self.cache(manifest, kind, device).iterdir():
                if path.name not in kept:
                    rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def file(self, manifest: Manifest, variant: ChosenVariant, own: Path) -> Path:
        """Return the file of a variant to load; `own` if it is the version's own. Raises Failure(MODEL): damaged."""
        if not variant.files:
            return own
        folder = self.compiled(manifest) / variant.folder
        for file in variant.files:
            if ".." in Path(file.path).parts or Path(file.path).is_absolute() or ".." in Path(variant.folder).parts:
                raise Failure(Code.MODEL, f"damaged: {file.path} is not in the variant's folder")
            try:
                found = describe_file(folder, file.path)
            except OSError as error:
                raise Failure(Code.MODEL, f"damaged: {file.path} cannot be read: {error.strerror}") from error
            if found.sha256 != file.sha256:
                raise Failure(Code.MODEL, f"damaged: {file.path} is not the file that was compiled (sha256 differs)")
        return folder / variant.files[0].path

    def _make_compiled(self, manifest: Manifest) -> None:
        """Create the folder of what is compiled, but not the version's: it would be in the way of its next upload.

        Raises Failure(STORAGE, INTERNAL), Failure(NOT_FOUND): the version was deleted.
        """
        try:
            with storage_errors(self._models):
                self.compiled(manifest).mkdir(exist_ok=True)
        except Failure as failure:
            if isinstance(failure.__cause__, FileNotFoundError):
                raise Failure(
                    Code.NOT_FOUND, f"version {manifest.version} of {manifest.model!r} was deleted"
                ) from failure
            raise

    def _path(self, manifest: Manifest, kind: str, device: str) -> Path:
        return self.compiled(manifest) / f"choice-{_key(manifest, kind, device)}.json"


def _key(manifest: Manifest, kind: str, device: str) -> str:
    return hashlib.sha256("\0".join((content_digest(manifest), kind, device)).encode()).hexdigest()[:16]
