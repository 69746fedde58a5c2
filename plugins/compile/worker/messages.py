"""What the driver of a race and a measuring process say to each other: a line of JSON each way. Pure.

Opening ─> Said ── then, in turns: TimeRuns | Answer ─> Said
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from millstream.plugins.compile.candidate import Flags
from millstream.plugins.compile.race.bounds import Extreme
from millstream.plugins.engines.jax.document import is_export_file
from millstream.services.model.signature import Signature

TIMES_MAX = 1000  # runs of one block
ANSWER_BYTES_MAX = 1 << 30  # of all outputs of one Answer
#: that a measuring process may write: the outputs of an Answer, and what its library compiles
WRITTEN_BYTES_MAX = ANSWER_BYTES_MAX + (512 << 20)
#: A hard limit above that on the memory that a load and its runs find, which follows what is used.
MEMORY_SPARE = 1.5


class Opening(BaseModel):
    """The first line: what to load.

    Args:
        inputs: an .npz of samples.
        options: of the load.
        memory_bytes: that the process may use; 0: no limit.
        folder: the only one that the process may write to; that of `inputs` it may read.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backend: str
    path: Path
    signature: Signature
    device: str
    threads: int
    inputs: Path
    folder: Path
    options: Flags = {}
    memory_bytes: int = 0

    @property
    def starts_programs(self) -> bool:
        """Whether the load compiles, in a process of its own: IREE does so with what was not compiled for it."""
        return self.backend == "iree" and is_export_file(self.path)


class TimeRuns(BaseModel):
    """Measure runs of `rows` rows for `seconds`, at least one run."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rows: int
    seconds: float


class Answer(BaseModel):
    """Run samples and write the outputs.

    Args:
        inputs: an .npz of samples; a version that batches runs all its rows.
        rows: of each run; the last one may have fewer.
        extreme: an input and the number that it gets in a single run of `rows` of the samples ("": the rows are equal,
            no more); None: all samples run as they are.
        to: the file to write, in the form of `millstream.plugins.compile.worker.outputs`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    inputs: Path
    rows: int
    to: Path
    extreme: Extreme | None = None


class Command(BaseModel):
    """One of the two."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    time: TimeRuns | None = None
    answer: Answer | None = None


class Said(BaseModel):
    """What a measuring process says.

    Args:
        error: why it failed; empty: it did not.
        times_s: of the runs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    error: str = ""
    times_s: tuple[float, ...] = Field((), max_length=TIMES_MAX)
