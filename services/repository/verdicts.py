"""Verdicts: what running a version has shown. Kept across restarts, beside the immutable manifest.

<root>/models/<model>/verdicts/<version>-<digest>.json   a Verdict; no file: nothing bad is known

A verdict is about content: the same files served in the same way, whenever they were published. It therefore outlives
a load that was aborted. It is removed when the version is deleted or gets other content, or when it is cleared.

What concerns loads is kept for each kind of worker, a backend on a kind of device such as "onnxruntime.cpu": a version
that fails on GPUs is still loaded on CPUs. What concerns batching holds for all kinds.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from millstream.services.model.manifest import Manifest
from millstream.services.model.names import check_name, check_version
from millstream.services.repository.disk import replace_file, storage_errors
from millstream.services.repository.documents import content_of, make_room, name_by_content, read_if_whole

REASON_CHARACTERS_MAX = 1000
DOCUMENT_BYTES_MAX = 64 << 10  # a larger file counts as no verdict
FILES_MAX = 64  # verdicts of one model; beyond, the oldest is deleted
KINDS_MAX = 16  # of one verdict; beyond, the oldest is forgotten
EVERY_KIND = ""  # of what an earlier release found: it did not note on what kind of worker


class LoadVerdict(BaseModel):
    """What loads on one kind of worker have shown. Times are seconds since the epoch; 0: never."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    failed: str = Field(
        "", max_length=REASON_CHARACTERS_MAX, description="Why workers do not load the version; empty: they do."
    )
    failed_at: float = Field(0, ge=0)
    deaths: int = Field(
        0, ge=0, description="Processes that died while they loaded the version, since its last successful load."
    )

    def with_failure(self, reason: str, now: float) -> LoadVerdict:
        """Return this verdict with a failure: workers of the kind no longer load the version."""
        return self.model_copy(update={"failed": reason[:REASON_CHARACTERS_MAX], "failed_at": now})


_NO_LOADS = LoadVerdict()
#: fields of documents of earlier releases, which had one verdict on loads for all kinds of workers -> their names now
_BEFORE_KINDS = {"failed": "failed", "failed_at": "failed_at", "load_deaths": "deaths"}


class Verdict(BaseModel):
    """What running a version has shown. Times are seconds since the epoch; 0: never."""

    #: Fields of a newer release are ignored, so that its verdict on a version that kills workers still counts.
    model_config = ConfigDict(frozen=True, extra="ignore")

    loads: dict[str, LoadVerdict] = Field({}, description="Kind of worker -> what loads there have shown.")
    batching_off: str = Field(
        "", max_length=REASON_CHARACTERS_MAX, description="Why requests run one at a time; empty: the manifest decides."
    )
    batching_off_at: float = Field(0, ge=0)
    mismatches: int = Field(0, ge=0, description="Batches whose rows differed from runs of one row.")

    @model_validator(mode="before")
    @classmethod
    def _from_before_kinds(cls, document: Any) -> Any:
        """Read a document of a release that had one verdict on loads for all kinds of workers."""
        if not isinstance(document, dict):
            return document
        before = {name: document[old] for old, name in _BEFORE_KINDS.items() if document.get(old)}
        if not before or document.get("loads"):
            return document
        return {**document, "loads": {EVERY_KIND: before}}

    def on(self, kind: str) -> LoadVerdict:
        """Return what loads on workers of a kind have shown, with what is known of every kind."""
        if not self.loads:
            return _NO_LOADS
        known, every = self.loads.get(kind, _NO_LOADS), self.loads.get(EVERY_KIND, _NO_LOADS)
        failed = known if known.failed else every
        return failed.model_copy(update={"deaths": max(known.deaths, every.deaths)})

    @property
    def failures(self) -> dict[str, LoadVerdict]:
        """The kinds of workers that do not load the version; EVERY_KIND: all."""
        return {kind: known for kind, known in self.loads.items() if known.failed}

    def failed_on(self, kinds: Collection[str]) -> str:
        """Return why no worker of these kinds loads the version; empty: those of one kind do.

        Without kinds, the reason is one that holds for every kind.
        """
        if not self.loads:
            return ""
        reasons = {kind: self.on(kind).failed for kind in sorted(kinds) or [EVERY_KIND]}
        if not all(reasons.values()):
            return ""
        if len(set(reasons.values())) == 1:
            return next(iter(reasons.values()))
        return "; ".join(f"{kind}: {reason}" for kind, reason in reasons.items())

    def with_loads(self, kind: str, found: LoadVerdict) -> Verdict:
        """Return this verdict with what loads on a kind of worker have shown."""
        others = {one: known for one, known in self.loads.items() if one != kind}
        loads = others if found == _NO_LOADS else {**others, kind: found}
        return self.model_copy(update={"loads": dict(list(loads.items())[-KINDS_MAX:])})

    def with_failure(self, kind: str, reason: str, now: float) -> Verdict:
        """Return this verdict with a failure: workers of the kind no longer load the version."""
        return self.with_loads(kind, self.loads.get(kind, _NO_LOADS).with_failure(reason, now))

    def with_load(self, kind: str) -> Verdict:
        """Return this verdict after a load that succeeded: earlier deaths count no longer."""
        after = self
        for one in (kind, EVERY_KIND):
            known = after.loads.get(one, _NO_LOADS)
            after = after.with_loads(one, known.model_copy(update={"deaths": 0}))
        return after

    def with_batching_off(self, reason: str, now: float) -> Verdict:
        """Return this verdict with batching switched off: requests of the version run one at a time."""
        return self.model_copy(update={"batching_off": reason[:REASON_CHARACTERS_MAX], "batching_off_at": now})


NO_VERDICT = Verdict()


class Verdicts:
    """The verdicts about all versions. Kept across restarts; removed with the version, or when one is cleared.

    Args:
        root: folder of the repository.
        changing: opens the repository's context for one change of a model at a time, which all readers notice.
    """

    def __init__(self, root: Path, changing: Callable[[str], AbstractContextManager[None]]) -> None:
        self._root = root
        self._models = root / "models"
        self._changing = changing

    def of(self, manifest: Manifest) -> Verdict:
        """Return the verdict about a version. A file that cannot be read as a verdict counts as none, and is logged."""
        folder = self._folder(manifest.model)
        if not folder.is_dir():  # the usual case, which needs no digest
            return NO_VERDICT
        return _read(folder / name_by_content(manifest))

    def change(self, manifest: Manifest, change: Callable[[Verdict], Verdict]) -> Verdict:
        """Replace the verdict by the result of `change` and return it. Concurrent changes are made one after the other.

        Raises Failure: STORAGE (the disk is full), INTERNAL (the folder cannot be written).
        """
        folder = self._folder(manifest.model)
        path = folder / name_by_content(manifest)
        with storage_errors(self._root), self._changing(manifest.model):
            before = _read(path)
            after = change(before)
            if after == before:
                return after
            if after == NO_VERDICT:
                self._remove(path)
                return after
            if (folder.parent / str(manifest.version)).is_dir():  # else the version was deleted in between
                folder.mkdir(mode=0o700, exist_ok=True)
                make_room(folder, path, FILES_MAX)
                replace_file(path, content_of(after))
            return after

    def clear(self, manifest: Manifest) -> bool:
        """Remove the verdict, because an operator wants the version tried again. False: there was none.

        Raises Failure as `change` does.
        """
        path = self._folder(manifest.model) / name_by_content(manifest)
        if not os.path.lexists(path):
            return False
        with storage_errors(self._root), self._changing(manifest.model):
            self._remove(path)
        return True

    def forget(self, model: str, version: int) -> None:
        """Remove all verdicts of a version that is deleted or published. The caller has opened the change."""
        for path in self._folder(model).glob(f"{check_version(version)}-*.json"):
            self._remove(path)

    @staticmethod
    def _remove(path: Path) -> None:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # not empty
            path.parent.rmdir()

    def _folder(self, model: str) -> Path:
        return self._models / check_name(model) / "verdicts"


def why_unmerged(manifest: Manifest, verdict: Verdict) -> str:
    """Return why requests of a version share no runs although they have rows; empty: they share runs."""
    return verdict.batching_off or (manifest.batching.reason if manifest.batching.decided == "unmerged" else "")


def _read(path: Path) -> Verdict:
    return read_if_whole(path, Verdict.model_validate_json, DOCUMENT_BYTES_MAX) or NO_VERDICT
