"""Compiled candidates of a version, kept between races: a race that is run again compiles nothing twice.

<folder>/<key>-<digest>/compiled.json    the outcome, and the digests of its files
<folder>/<key>-<digest>/…                its files
<folder>/.new-…                          what a race works on; deleted by the next one

The digest is of the version's content, the candidate, the libraries' versions, the device, and the samples of a lossy
one. A folder is written under another name and renamed. What a compilation refused is not kept: it may have been short
of time or memory.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shutil import rmtree
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from millstream.plugins.compile.candidate import Candidate, Compiled, CompileOutcome
from millstream.plugins.compile.race.report import RaceTask
from millstream.services.device import find_device
from millstream.services.model.manifest import SourceFile
from millstream.services.model.version_files import describe_file
from millstream.services.repository.disk import fsync_tree
from millstream.services.repository.documents import content_digest

DOCUMENT = "compiled.json"
DOCUMENT_BYTES_MAX = 1 << 20
NEW = ".new-"
DIGITS = 16
PROOF = "proof 1"  # of what a compiled form had to prove; another number compiles all again
#: Packages whose version may change what a compilation writes.
LIBRARIES = (
    "onnxruntime", "onnxruntime-gpu", "onnx", "openvino", "nncf", "torch", "jax", "jaxlib", "iree-base-compiler",
    "tensorflow", "tensorflow-cpu", "apache-tvm", "tensorrt",
)  # fmt: skip


class Kept(BaseModel):
    """The document of a compiled candidate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    outcome: CompileOutcome
    files: tuple[SourceFile, ...]


class Prepared(NamedTuple):
    """A compiled candidate. `folder`: its folder's name in the cache; `compile_s` is what it took to compile."""

    compiled: Compiled
    folder: str
    compile_s: float
    size_bytes: int
    cached: bool
    stderr: str = ""


class CompiledCache:
    """The compiled candidates of one version, for one device.

    Args:
        task: of the race.
        samples: digest of those for calibration.
    """

    def __init__(self, task: RaceTask, samples: str) -> None:
        self.root = task.cache
        self._samples = samples
        self._of_all = [PROOF, content_digest(task.manifest), task.device, find_device(task.device).fingerprint]
        self._of_all += [f"{name} {version}" for name, version in libraries().items()]

    def name(self, candidate: Candidate) -> str:
        """Return the name of a candidate's folder."""
        parts = [*self._of_all, candidate.key, self._samples if candidate.lossy else ""]
        return f"{candidate.key}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:DIGITS]}"

    def find(self, candidate: Candidate) -> Prepared | None:
        """Return a compiled candidate whose files have their digests; a damaged one is deleted."""
        folder = self.root / self.name(candidate)
        try:
            if (folder / DOCUMENT).stat().st_size > DOCUMENT_BYTES_MAX:
                raise ValueError
            kept = Kept.model_validate_json((folder / DOCUMENT).read_bytes())
            if kept.outcome.compiled is None or tuple(file.path for file in kept.files) != kept.outcome.compiled.files:
                raise ValueError
            for file in kept.files:
                if Path(file.path).name != file.path or describe_file(folder, file.path) != file:
                    raise ValueError
        except (OSError, ValueError, ValidationError):
            rmtree(folder, ignore_errors=True)
            return None
        return _prepared(kept.outcome, folder.name, cached=True)

    def keep(self, candidate: Candidate, folder: Path, outcome: CompileOutcome) -> Prepared:
        """Publish a folder of `working`. Raises OSError."""
        assert outcome.compiled is not None
        kept = Kept(outcome=outcome, files=tuple(describe_file(folder, name) for name in outcome.compiled.files))
        (folder / DOCUMENT).write_text(kept.model_dump_json(indent=1))
        fsync_tree(folder)
        target = self.root / self.name(candidate)
        rmtree(target, ignore_errors=True)
        folder.rename(target)
        return _prepared(outcome, target.name, cached=False)


@contextmanager
def working(root: Path) -> Iterator[Path]:
    """Yield a folder below `root` for unfinished work, deleted at the end, as are those of processes that were killed.

    One race works there at a time: its worker has the lock of the job. Raises OSError.
    """
    root.mkdir(exist_ok=True)  # its parent must be there: the version may have been deleted
    for abandoned in root.glob(f"{NEW}*"):
        rmtree(abandoned, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=NEW, dir=root))
    try:
        yield folder
    finally:
        rmtree(folder, ignore_errors=True)


def libraries() -> dict[str, str]:
    """Return the versions of the packages that compile, those that are installed."""
    found: dict[str, str] = {}
    for name in LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def _prepared(outcome: CompileOutcome, folder: str, *, cached: bool) -> Prepared:
    assert outcome.compiled is not None
    return Prepared(outcome.compiled, folder, outcome.seconds, outcome.size_bytes, cached, outcome.stderr)
