"""Footprints: what instances of a version took in workers. Kept across restarts, beside the versions.

<root>/footprints/<model>/<version>-<digest>.json   {kind: Measured}; no file: nothing was measured

A kind is a backend on a kind of device, like "onnxruntime.cpu". A footprint belongs to the content of a version, like a
verdict. Writing one changes neither the repository's token nor the stamps of models, so no process reads them again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from shutil import rmtree
from threading import Lock

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from millstream.services.model.manifest import Manifest
from millstream.services.model.names import check_name, check_version
from millstream.services.placement.prediction import ASSUMED_ON_DEVICE, ASSUMED_RATIOS, MEASURED_MAX, Ratios, at_least
from millstream.services.placement.views import Footprint
from millstream.services.repository.disk import locked, storage_errors
from millstream.services.repository.documents import make_room, name_by_content, read_if_whole

DOCUMENT_BYTES_MAX = 16 << 10  # a larger file counts as not known
FILES_MAX = 64  # of one model; beyond, the oldest is deleted
KINDS_MAX = 16  # of one version; beyond, the oldest is deleted
READ_AHEAD_MAX = 1024  # versions that a process reads at its start: some 0.1 s
VERSIONS_MAX = 65_536  # in the memory of one process; beyond, all are read again
#: The clock of a file system ticks every few milliseconds: two changes within one tick have the same time.
_SETTLED_NS = 50_000_000
#: Part of a measurement by which the next may differ without being written.
ALIKE = 0.2
#: Further measurements after which the ratios for unknown versions are learnt again.
LEARN_EVERY = 1.25


class Measured(BaseModel):
    """What one instance took. Bytes and seconds as in placement.views.Footprint.

    Args:
        load_s: 0: not measured.
        measured: False: a load found no memory, and the next is to reserve these bytes at least; 0: only its seconds
            were measured.
        disturbed: requests of other models ran while it was measured, so that the bytes may be too high.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    resident_bytes: int = Field(ge=0)
    peak_bytes: int = Field(0, ge=0)
    load_s: float = Field(0, ge=0, allow_inf_nan=False)
    measured: bool = True
    disturbed: bool = False
    device_resident_bytes: int = Field(0, ge=0)
    device_peak_bytes: int = Field(0, ge=0)

    @staticmethod
    def of(footprint: Footprint, *, disturbed: bool = False) -> Measured:
        return Measured(**asdict(footprint), disturbed=disturbed)

    @property
    def footprint(self) -> Footprint:
        return Footprint(**self.model_dump(exclude={"disturbed"}))


_BYTES = ("resident_bytes", "peak_bytes", "device_resident_bytes", "device_peak_bytes")
_DOCUMENT = TypeAdapter(dict[str, Measured])


def file_bytes(manifest: Manifest) -> int:
    """Return the bytes of the files that a worker reads to load a version."""
    return sum(file.size_bytes for file in manifest.files)


class Footprints:
    """The footprints of all versions of a folder repository. Safe for several threads and processes.

    Args:
        root: folder of the repository.
    """

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        self._folder = self._root / "footprints"
        self._lock = Lock()
        self._known: dict[str, tuple[int, dict[str, Measured]]] = {}  # content id -> time of its folder, its document
        #: kind and format -> content id -> bytes of files, sample
        self._samples: dict[tuple[str, str], dict[str, tuple[int, Footprint]]] = {}
        self._ratios: dict[tuple[str, str], tuple[int, Ratios]] = {}  # likewise -> samples it was learnt from

    def of(self, manifest: Manifest, kind: str) -> Footprint:
        """Return what an instance of the version takes: measured, else predicted. One stat call if nothing changed."""
        known = self.measured(manifest, kind)
        if known is not None and known.measured:
            return known.footprint
        predicted = self.ratios(kind, manifest.source_format).predict(file_bytes(manifest))
        return predicted if known is None else at_least(predicted, known.footprint)

    def learn(self, manifests: Iterable[Manifest]) -> None:
        """Read what was measured for up to READ_AHEAD_MAX versions, so that others are predicted from it."""
        for manifest in islice(manifests, READ_AHEAD_MAX):
            self.measured(manifest, "")

    def kinds(self, manifest: Manifest) -> list[str]:
        """Return the kinds of instances that were measured for a version."""
        self.measured(manifest, "")
        with self._lock:
            _, document = self._known.get(manifest.content_id, (-1, {}))
            return [kind for kind, one in document.items() if one.measured]

    def measured(self, manifest: Manifest, kind: str) -> Measured | None:
        """Return what was written for the version; None: nothing."""
        folder = f"{self._folder}/{manifest.model}"  # a Path for each of a thousand versions takes longer than the stat
        try:
            changed = os.stat(folder).st_mtime_ns  # noqa: PTH116 - see above
        except OSError:
            changed = 0
        content_id = manifest.content_id
        with self._lock:
            at, document = self._known.get(content_id, (-1, {}))
            if at != changed:
                document = _read(Path(folder, name_by_content(manifest))) if changed else {}
                if len(self._known) >= VERSIONS_MAX:
                    self._known.clear()
                self._known[content_id] = (-1 if changed > time.time_ns() - _SETTLED_NS else changed, document)
                for one, known in document.items():
                    self._sample(manifest, one, known)
            return document.get(kind)

    def write(self, manifest: Manifest, kind: str, measured: Measured) -> Measured:
        """Keep what an instance took, and return what is known then.

        An undisturbed measurement replaces every other one; of disturbed ones the lowest bytes count, since requests
        of other models only add to them. Raises Failure: STORAGE (the disk is full), INTERNAL.
        """
        folder = self._folder / check_name(manifest.model)
        path = folder / name_by_content(manifest)
        with storage_errors(self._root):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with locked(self._folder / ".lock"):
                document = _read(path)
                before = document.pop(kind, None)
                kept = _merged(before, measured)
                if before is not None and _alike(before, kept):
                    return before
                if not (self._root / "models" / manifest.model).is_dir():  # deleted in between
                    rmtree(folder, ignore_errors=True)
                    return kept
                document[kind] = kept
                for oldest in list(document)[:-KINDS_MAX]:
                    del document[oldest]
                make_room(folder, path, FILES_MAX)
                # Not fsynced, which takes longer than the load of a small version: a lost file is measured again.
                temporary = path.with_name(path.name + ".new")
                temporary.write_bytes(_DOCUMENT.dump_json(document))
                temporary.replace(path)
        with self._lock:
            self._known.pop(manifest.content_id, None)
            self._sample(manifest, kind, kept)
        return kept

    def forget(self, model: str, version: int) -> None:
        """Remove what is known of a version that is deleted. Errors are ignored: it is only a prediction."""
        for path in (self._folder / check_name(model)).glob(f"{check_version(version)}-*.json"):
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def forget_model(self, model: str) -> None:
        """Remove what is known of a deleted model."""
        rmtree(self._folder / check_name(model), ignore_errors=True)

    def ratios(self, kind: str, source_format: str = "onnx") -> Ratios:
        """Return what versions of a kind and format take for each byte of their files, as far as this process read."""
        with self._lock:
            samples = self._samples.get((kind, source_format), {})
            assumed = ASSUMED_RATIOS if kind.endswith(".cpu") else ASSUMED_ON_DEVICE
            learnt_from, ratios = self._ratios.get((kind, source_format), (0, assumed))
            if len(samples) > learnt_from * LEARN_EVERY:
                ratios = Ratios.learn(list(samples.values()), assumed)
                self._ratios[kind, source_format] = (len(samples), ratios)
            return ratios

    def _sample(self, manifest: Manifest, kind: str, known: Measured) -> None:
        samples = self._samples.setdefault((kind, manifest.source_format), {})
        if known.measured and (manifest.content_id in samples or len(samples) < MEASURED_MAX):
            samples[manifest.content_id] = (file_bytes(manifest), known.footprint)


def _merged(before: Measured | None, now: Measured) -> Measured:
    if before is None:
        return now
    if not now.measured and not now.footprint.load_bytes and not now.footprint.device_load_bytes:
        return before.model_copy(update={"load_s": now.load_s})
    if not now.load_s:  # it found no memory
        now = now.model_copy(update={"load_s": before.load_s})
    if not before.measured or not now.disturbed or not now.measured:
        return now
    if not before.disturbed:
        return before.model_copy(update={"load_s": now.load_s})
    return now.model_copy(update={name: min(getattr(before, name), getattr(now, name)) for name in _BYTES})


def _alike(before: Measured, now: Measured) -> bool:
    """Return whether a measurement differs too little from the one before it to be written."""
    if (before.measured, before.disturbed) != (now.measured, now.disturbed):
        return False
    pairs = ((getattr(before, name), getattr(now, name)) for name in (*_BYTES, "load_s"))
    return all(abs(one - other) <= ALIKE * max(one, other) for one, other in pairs)


def _read(path: Path) -> dict[str, Measured]:
    return read_if_whole(path, _DOCUMENT.validate_json, DOCUMENT_BYTES_MAX) or {}
