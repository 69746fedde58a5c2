"""The target "xla": XLA for the CPU, in JAX, with other settings than those that the version is served with.

XLA compiles a function of jax.export when a worker runs it, so nothing is written: a candidate is a set of options.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from millstream.plugins.compile.candidate import Candidate, Compiled, Flags, Subject
from millstream.plugins.compile.targets.base import Target, runtime_version
from millstream.plugins.engines.jax.document import FORMAT


class Xla(Target):
    """Settings of XLA."""

    name = "xla"
    backend = "jax"
    modules: ClassVar = {"jax": "pip install 'millstream[jax]'"}

    def candidates(self, subject: Subject) -> Sequence[Candidate]:
        """Return exact sizes instead of padded ones, where requests share runs, and fast mathematics."""
        if subject.source_format != FORMAT:
            return ()
        exact: list[Flags] = [{"padding": False}] if subject.signature.batching else []
        plain = [Candidate(target=self.name, flags=flags, lossy=False) for flags in exact]
        return [*plain, Candidate(target=self.name, flags={"fast_math": True}, lossy=True)]

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Return the options; no file is written."""
        return Compiled(backend=self.backend, options=candidate.flags, runtime=runtime_version("jax"))


TARGETS = (Xla(),)
