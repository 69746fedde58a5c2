"""The interface of a target: a compiler, or a way to use a library, that makes a faster form of a version.

available(device) ─> candidates(subject) ─> compile(subject, candidate, folder, samples) ─> Compiled
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from millstream.plugins.compile.candidate import Candidate, Compiled, Missing, Narrowing, Subject


class Target(Protocol):
    """A target. Importing its module must not import a library.

    Args:
        name: such as "openvino-bf16". A candidate names it.
        backend: by which all its compiled forms are loaded.
        lossy: all its candidates are.
        experimental: it takes part in a race only if it is named.
        deterministic: compiling the same again writes the same bytes.
        narrows: what its library does to wide types of an ONNX file; None: it computes with those that the file has.
    """

    name: str
    backend: str
    lossy: bool = False
    experimental: bool = False
    deterministic: bool = True
    narrows: Narrowing | None = None

    def available(self, device: str) -> Missing | None:
        """Return what is missing to compile for `device` on this machine; None: nothing. Imports no library."""

    def candidates(self, subject: Subject) -> Sequence[Candidate]:
        """Return the candidates worth a try, the most promising first; none for what the target cannot compile.

        Equal for equal subjects. Reads at most the file's beginning and imports no library: what a library refuses is
        found out by `compile`.
        """

    def programs(self) -> Sequence[Path]:
        """Return the programs that `compile` starts, and folders that these read; the sandbox allows no others."""
        return ()

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Write the compiled form to `folder`, which is empty. Runs in a process of its own (compile_process).

        Args:
            subject: the version.
            candidate: one of `candidates(subject)`.
            folder: the only place that it may write to, besides the folder for temporary files.
            samples: an .npz file of `input/<name>` arrays, and `output/<name>` where outputs are known. Their first
                dimension is the rows of the samples, or of a single call if the version does not batch.

        Raises Failure(INVALID) if the candidate cannot be compiled; any other exception counts as that, too.
        """
