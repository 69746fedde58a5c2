"""The interface of a target: a compiler, or a way to use a library, that makes a faster form of a version.

available(device) ─> candidates(subject) ─> compile(subject, candidate, folder, samples) ─> Compiled
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from millstream.plugins.compile.candidate import Candidate, Compiled, Flags, Missing, Narrowing, Subject
from millstream.services.device import find_device


class Target:
    """A target, for CPUs unless it says otherwise. Importing its module must not import a library.

    Args:
        name: such as "openvino-bf16". A candidate names it.
        backend: by which all its compiled forms are loaded.
        formats: of versions that it compiles.
        modules: Python packages that it needs, and what installs each.
        features: flags of processors, of which it needs one; empty: it needs none.
        lossy: all its candidates are.
        experimental: it takes part in a race only if it is named.
        deterministic: compiling the same again writes the same bytes.
        narrows: what its library does to wide types of an ONNX file; None: it computes with those that the file has.
    """

    name: str
    backend: str
    formats: frozenset[str] = frozenset({"onnx"})
    modules: ClassVar[Mapping[str, str]] = {}
    features: tuple[str, ...] = ()
    lossy: bool = False
    experimental: bool = False
    deterministic: bool = True
    narrows: Narrowing | None = None

    def available(self, device: str) -> Missing | None:
        """Return what is missing to compile for `device` on this machine; None: nothing. Imports no library."""
        if device != "cpu":
            return Missing(f"{self.name} is used on CPUs alone, not on {device}")
        missing = (missing_module(module, install) for module, install in self.modules.items())
        return next(filter(None, missing), None) or missing_feature(self.features)

    def candidates(self, subject: Subject) -> Sequence[Candidate]:
        """Return the candidates worth a try, the most promising first; none for what the target cannot compile.

        Equal for equal subjects. Reads at most the file's beginning and imports no library: what a library refuses is
        found out by `compile`.
        """
        found = self.flags(subject) if subject.source_format in self.formats else ()
        return tuple(Candidate(target=self.name, flags=flags, lossy=self.lossy) for flags in found)

    def flags(self, subject: Subject) -> Sequence[Flags]:
        """Return the flags of the candidates for a version of one of the formats."""
        raise NotImplementedError

    def programs(self) -> Sequence[Path]:
        """Return the programs that `compile` starts, and folders that these read; the sandbox allows no others."""
        return ()

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Write the compiled form to `folder`, which is empty. Runs in a process of its own (form_process).

        Args:
            subject: the version.
            candidate: one of `candidates(subject)`.
            folder: the only place that it may write to, besides the folder for temporary files.
            samples: an .npz file of `input/<name>` arrays, and `output/<name>` where outputs are known. Their first
                dimension is the rows of the samples, or of a single call if the version does not batch.

        Raises Failure(INVALID) if the candidate cannot be compiled; any other exception counts as that, too.
        """
        raise NotImplementedError


def missing_module(module: str, install: str) -> Missing | None:
    """Return what to install if `module` cannot be imported here; None if it can. Imports nothing."""
    try:
        found = find_spec(module) is not None
    except (ImportError, ValueError):  # its package is missing, or has no specification
        found = False
    return None if found else Missing(f"the Python package {module} is not installed", install)


def missing_feature(features: Sequence[str]) -> Missing | None:
    """Return that the processor lacks all of `features`; None if it has one, or none is needed."""
    if not features or set(features) & set(find_device("cpu").features):
        return None
    return Missing(f"this processor has none of {', '.join(features)}")


def runtime_version(*packages: str) -> str:
    """Return "name version" of the first of `packages` that is installed; "unknown" if none is."""
    for package in packages:
        try:
            return f"{package} {metadata.version(package)}"
        except metadata.PackageNotFoundError:
            continue
    return "unknown"
