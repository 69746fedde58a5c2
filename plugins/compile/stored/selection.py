"""Selections: which compiled form of a version serves on a kind of device, and how a verdict changes that.

<root>/models/<model>/<version>/compiled/choice-<key>.json   Selection; no file: the version's own file serves
<root>/models/<model>/<version>/compiled/race-<key>/…        the folders of the candidates of a race

The key is a digest of the version's content, the kind of worker and its device.

report ─> decide ─> Selection, losers deleted ─> workers swap          undo ─> no Selection ─> workers swap back
The selection changes before the job: after a kill between the two, the race runs again, or is undone again.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import Counter
from contextlib import suppress
from pathlib import Path
from shutil import rmtree
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from millstream.plugins.compile.candidate import Bounds
from millstream.plugins.compile.race.report import BASELINE, Gate, RaceReport, Row
from millstream.plugins.compile.stored.job import Job, Jobs, RaceState, RaceUndone
from millstream.services.errors import Code, Failure
from millstream.services.model.manifest import Manifest, SourceFile
from millstream.services.model.version_files import describe_file
from millstream.services.repository.disk import read_file, replace_file, storage_errors
from millstream.services.repository.documents import content_digest
from millstream.services.repository.folder import FolderRepository

log = logging.getLogger("millstream.races")

FORMAT = 2  # forms of documents with another number had less to prove, and serve only after another race
DOCUMENT_BYTES_MAX = 1 << 20  # a larger one counts as damaged
FILES_MAX = 256  # of one form


class Form(BaseModel):
    """A compiled form that serves.

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


class Selection(BaseModel):
    """The compiled form that serves a version on a kind of device.

    Args:
        gate: that the form passed.
        raced_at: instant of the verdict, in seconds since the epoch; tells two selections apart.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    format: int = FORMAT
    content: str
    kind: str
    device: str
    form: Form
    ratio: float = 1.0
    gate: Gate = Gate()
    raced_at: float = 0.0

    @model_validator(mode="before")
    @classmethod
    def _of_table(cls, document: Any) -> Any:
        """Read the form on disk: a table of runs by their rows, of which the form with the most lines serves."""
        if not isinstance(document, dict) or "form" in document:
            return document
        try:
            lines = Counter(dict(document["table"]).values())
            forms = {form["key"]: form for form in document["variants"]}
        except (KeyError, TypeError, ValueError):
            raise ValueError("it has no table of forms") from None
        most = max(forms, key=lambda key: lines[key], default=None)
        if most is None or lines[most] == 0 or (lines[BASELINE] > lines[most] and not forms[most].get("single")):
            raise ValueError("its table names no form for most runs")
        return {**document, "form": forms[most]}

    def stored(self) -> bytes:
        """Return the document as earlier releases read it, too: one line for runs of any number of rows."""
        document = self.model_dump(mode="json", exclude={"form"})
        table = {"1": self.form.key, "2": BASELINE} if self.form.single else {"1": self.form.key}
        document |= {"table": table, "variants": [self.form.model_dump(mode="json")]}
        return json.dumps(document, indent=1).encode() + b"\n"


class Selections:
    """The selections of a repository's versions. Safe for several threads and processes."""

    def __init__(self, repository: FolderRepository) -> None:
        self._repository = repository
        self._damaged: dict[Path, tuple[int, int, int]] = {}  # documents of which the log says so -> their stamps

    def compiled(self, manifest: Manifest) -> Path:
        """Return the folder of everything that is compiled from a version."""
        return self._repository.variants.compiled(manifest)

    def cache(self, manifest: Manifest, kind: str, device: str) -> Path:
        """Return the folder of the candidates of a race."""
        return self.compiled(manifest) / f"race-{_key(manifest, kind, device)}"

    def make_cache(self, manifest: Manifest, kind: str, device: str) -> Path:
        """Return the folder of candidates, created. Raises Failure(STORAGE, INTERNAL, NOT_FOUND)."""
        folder = self.cache(manifest, kind, device)
        self._make_compiled(manifest)
        with storage_errors(folder.parent):
            folder.mkdir(exist_ok=True)
        return folder

    def get(self, manifest: Manifest, kind: str, device: str) -> Selection | None:
        """Return what serves; None: the version's own file. A selection that is damaged or of other content is none."""
        path = self._path(manifest, kind, device)
        stamp = (0, 0, 0)
        try:
            about = path.stat()
            stamp = (about.st_ino, about.st_mtime_ns, about.st_size)
            found = Selection.model_validate_json(read_file(path, DOCUMENT_BYTES_MAX))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            if self._damaged.get(path) != stamp:  # workers ask twice a second
                self._damaged[path] = stamp
                why = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
                log.warning("%s is damaged and is not followed: %s", path, why)
            return None
        made_for = (found.content, found.kind, found.device, found.format)
        return found if made_for == (content_digest(manifest), kind, device, FORMAT) else None

    def put(self, manifest: Manifest, kind: str, device: str, selection: Selection | None) -> bool:
        """Serve a selection; None: the version's own file. The caller has the lock of the job, or undoes.

        Returns whether a form served before. Raises Failure(STORAGE, INTERNAL, NOT_FOUND).
        """
        path = self._path(manifest, kind, device)
        served = path.exists()
        with storage_errors(path.parent.parent):
            if selection is None:
                with suppress(FileNotFoundError, NotADirectoryError):
                    path.unlink()
            else:
                self._make_compiled(manifest)
                replace_file(path, selection.stored())
        return served

    def sweep(self, manifest: Manifest, kind: str, device: str, kept: str) -> None:
        """Delete the candidates' folders of a race except the `kept` one, by its name below the race's folder."""
        with suppress(OSError):
            for path in self.cache(manifest, kind, device).iterdir():
                if path.name != kept:
                    rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)

    def file(self, manifest: Manifest, form: Form, own: Path) -> Path:
        """Return the file of a form to load; `own` if it is the version's own. Raises Failure(MODEL): damaged."""
        if not form.files:
            return own
        folder = self.compiled(manifest) / form.folder
        for file in form.files:
            if ".." in Path(file.path).parts or Path(file.path).is_absolute() or ".." in Path(form.folder).parts:
                raise Failure(Code.MODEL, f"damaged: {file.path} is not in the form's folder")
            try:
                found = describe_file(folder, file.path)
            except OSError as error:
                raise Failure(Code.MODEL, f"damaged: {file.path} cannot be read: {error.strerror}") from error
            if found.sha256 != file.sha256:
                raise Failure(Code.MODEL, f"damaged: {file.path} is not the file that was compiled (sha256 differs)")
        return folder / form.files[0].path

    def _make_compiled(self, manifest: Manifest) -> None:
        """Create the folder of what is compiled, but not the version's: it would be in the way of its next upload.

        Raises Failure(STORAGE, INTERNAL), Failure(NOT_FOUND): the version was deleted.
        """
        folder = self.compiled(manifest)
        try:
            with storage_errors(folder.parent):
                folder.mkdir(exist_ok=True)
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


def decide(selections: Selections, jobs: Jobs, manifest: Manifest, job: Job, report: RaceReport, now: float) -> bool:
    """Store the report of a race, and serve its winner. Returns whether there is one.

    A job that was cancelled, deleted or asked for anew meanwhile changes nothing, and neither does one whose document
    cannot be written: what served before serves on. Raises Failure(STORAGE, INTERNAL, MODEL).
    """
    selection = _selection(selections.cache(manifest, job.kind, job.device), manifest, job, report, now)
    present = jobs.get(job)
    if present is None or present.state is not RaceState.RUNNING or not present.is_same_request(job):
        return False
    before = selections.get(manifest, job.kind, job.device)
    selections.put(manifest, job.kind, job.device, selection)

    def decided(one: Job) -> Job | None:
        return one.ended(RaceState.DECIDED, now, report.why, report) if one.state is RaceState.RUNNING else None

    try:
        after = jobs.change(job, decided)
    except Failure:
        _serve_again(selections, manifest, job, before)
        raise
    if after is None or after.state is not RaceState.DECIDED:
        _serve_again(selections, manifest, job, before)
        return False
    kept = selection.form.folder.rpartition("/")[2] if selection is not None else ""
    selections.sweep(manifest, job.kind, job.device, kept)
    return selection is not None


def undo(selections: Selections, jobs: Jobs, manifest: Manifest, job: Job, undone: RaceUndone) -> bool:
    """Serve the version's own file again. Returns whether a form served. Raises Failure(STORAGE, INTERNAL)."""
    served = selections.put(manifest, job.kind, job.device, None)

    def change(one: Job | None) -> Job | None:
        if one is None or one.undone is not None or one.winner is None:
            return None
        return one.model_copy(update={"undone": undone})

    jobs.put(job, change)
    return served


def _serve_again(selections: Selections, manifest: Manifest, job: Job, before: Selection | None) -> None:
    """Serve what served before; the version's own file if there is no space to write that, which removal needs not."""
    try:
        selections.put(manifest, job.kind, job.device, before)
    except Failure:
        with suppress(Failure):
            selections.put(manifest, job.kind, job.device, None)


def _selection(cache: Path, manifest: Manifest, job: Job, report: RaceReport, now: float) -> Selection | None:
    """Return what a report says is to serve; None: the baseline. Raises Failure(MODEL): files are missing."""
    if report.winner is None:
        return None
    row = report.row(report.winner)
    if row is None or row.compiled is None:
        raise Failure(Code.MODEL, f"the report names {report.winner}, which was not compiled")
    return Selection(
        content=content_digest(manifest),
        kind=job.kind,
        device=job.device,
        form=_form(cache, row),
        ratio=report.ratio,
        gate=job.options.gate,
        raced_at=now,
    )


def _form(cache: Path, row: Row) -> Form:
    assert row.compiled is not None
    name = row.folder or row.candidate
    if Path(name).name != name:
        raise Failure(Code.MODEL, f"the folder {name!r} of {row.candidate} is not in the folder of the race")
    return Form(
        key=row.candidate,
        target=row.target,
        folder=f"{cache.name}/{name}",
        files=_described(cache / name, row.compiled.files),
        backend=row.compiled.backend,
        options=row.compiled.options,
        runtime=row.compiled.runtime,
        single=row.single,
        lossy=row.lossy,
        bounds=row.bounds,
    )


def _described(folder: Path, loaded: tuple[str, ...]) -> tuple[SourceFile, ...]:
    """Return all files of a candidate with their digests, the loaded ones first: a library may open the others."""
    if not loaded:
        return ()
    try:
        found = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
        return tuple(describe_file(folder, name) for name in dict.fromkeys((*loaded, *found)))
    except OSError as error:
        raise Failure(Code.MODEL, f"a compiled file cannot be read: {error.strerror}") from error
