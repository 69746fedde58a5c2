"""The target "onnxruntime": the version's own file, with other settings of the session.

Threads from 1 to the share, an arena for activations, and memory patterns; threads never spin.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from millstream.plugins.compile.candidate import Candidate, Compiled, Flags, Subject
from millstream.plugins.compile.targets.base import Target, runtime_version

THREADS_MAX = 8  # numbers of threads to try: powers of two, up to the share


class OnnxRuntimeSettings(Target):
    """Compiles nothing: each candidate is a set of options for the backend. Outputs differ by rounding at most."""

    name = backend = "onnxruntime"
    modules: ClassVar = {"onnxruntime": "pip install 'millstream[cpu]'"}

    def flags(self, subject: Subject) -> Sequence[Flags]:
        """Return the settings that differ from those that the version is served with now."""
        found: list[Flags] = [{"threads": subject.threads, "arena": True, "memory_pattern": True}]
        for threads in thread_numbers(subject.threads)[1:]:
            found += [{"threads": threads}, {"threads": threads, "arena": True, "memory_pattern": True}]
        return found

    def compile(self, subject: Subject, candidate: Candidate, folder: Path, samples: Path | None) -> Compiled:
        """Return the options; no file is written."""
        return Compiled(
            backend=self.backend,
            options=candidate.flags,
            runtime=runtime_version("onnxruntime", "onnxruntime-gpu"),
        )


def thread_numbers(share: int) -> list[int]:
    """Return numbers of threads worth a try, the share first: powers of two, up to it."""
    powers = [1 << bit for bit in range(share.bit_length()) if 1 << bit < share]
    return [share, *reversed(powers)][:THREADS_MAX]
