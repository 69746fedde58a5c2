"""What the process of a compilation reads and writes. Pure.

CompileTask (JSON, standard input) ─> compile_process ─> CompileOutcome (JSON, standard output)
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from millstream.plugins.compile.candidate import Candidate, Compiled, Subject

SCRATCH = ".scratch"  # in the folder of a compilation: temporary files, deleted at its end
SECONDS_DEFAULT = 600.0
MEMORY_BYTES_DEFAULT = 8 << 30
WRITTEN_BYTES_DEFAULT = 8 << 30


class CompileTask(BaseModel):
    """One compilation.

    Args:
        folder: an empty folder for the files, absolute.
        samples: see `Target.compile`; None: there are none.
        seconds_max: the compilation is ended after this time.
        memory_bytes: private memory that each process of the compilation may use; all of them together 1.5 times this.
        written_bytes: size of the largest file, and of all files together, that it may write.
        low_priority: whether it takes only the processor time that others leave; False: calls wait for its end.
        share: it takes a share of the processor instead, as the race that it belongs to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    subject: Subject
    candidate: Candidate
    folder: Path
    samples: Path | None = None
    seconds_max: float = SECONDS_DEFAULT
    memory_bytes: int = MEMORY_BYTES_DEFAULT
    written_bytes: int = WRITTEN_BYTES_DEFAULT
    low_priority: bool = True
    share: bool = False


class CompileOutcome(BaseModel):
    """What came of a compilation.

    Args:
        compiled: None if it failed.
        error: why it failed, on one line; empty if it did not.
        seconds: of the compilation, without the start of its process.
        size_bytes: of the files of `compiled`.
        stderr: the end of its standard error; added by the caller.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    compiled: Compiled | None = None
    error: str = ""
    seconds: float = 0.0
    size_bytes: int = 0
    stderr: str = ""
