"""What is compiled, how, and what came of it. Pure.

Subject ─> Target.candidates ─> Candidate ─> Target.compile ─> Compiled, which names a backend, files and options
CompileTask (JSON) ─> a process of its own (form_runner) ─> CompileOutcome (JSON)
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from millstream.services.model.manifest import ROWS_MAX_DEFAULT
from millstream.services.model.signature import Signature

KEY_DIGITS = 8  # of the digest in a candidate's key
FLAGS_MAX = 16  # of a candidate, and options of a compiled form
FILES_MAX = 64  # of one compiled form
INPUTS_MAX = 4096  # with bounds
SCRATCH = ".scratch"  # in the folder of a compilation: temporary files, deleted at its end
COMPILE_S_MAX = 600.0
MEMORY_BYTES_MAX = WRITTEN_BYTES_MAX = 8 << 30

#: Strict, so that True stays a bool and 1 an int in JSON and back: the key is a digest of them.
Value = StrictBool | StrictInt | StrictFloat | StrictStr
Flags = Annotated[dict[str, Value], Field(max_length=FLAGS_MAX)]


#: For inputs by name, the least and the greatest number with which a form was proven, or judged, to be right.
Bounds = Annotated[dict[str, tuple[float, float]], Field(max_length=INPUTS_MAX)]
#: No axis of an input of such a form has more elements: sizes are integers that its library computes with, too.
DIMENSION_MAX = 1 << 20


class Narrowing(NamedTuple):
    """What a library does to wide types.

    Args:
        carried: integers up to this magnitude stay what they are where they are moved, or cast.
        computed: those up to this magnitude stay exact in arithmetic.
        doubles: whether it computes FP64 as such.
    """

    carried: int
    computed: int
    doubles: bool = False


class Subject(BaseModel):
    """A version as a target sees it.

    Args:
        path: the file that is served, absolute.
        source_format: as in the manifest: "onnx", "torch-export", …
        rows_max: most rows of a run.
        threads: the share of a worker: a candidate uses at most these.
        device: as of a worker: "cpu", "cuda:0", "tensorrt:0".
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: Path
    source_format: str
    signature: Signature
    rows_max: int = ROWS_MAX_DEFAULT
    threads: int = 1
    device: str = "cpu"


class Candidate(BaseModel):
    """One way to compile a version.

    Args:
        target: name of the target that compiles it.
        flags: what distinguishes it from the target's other candidates.
        lossy: outputs differ beyond the rounding of floating-point numbers. Its compilation needs real samples, or the
            consent that random ones are used.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str
    flags: Flags = {}
    lossy: bool

    @property
    def key(self) -> str:
        """The target and a short digest of the flags; equal for equal candidates, in every process."""
        flags = json.dumps(self.flags, sort_keys=True, separators=(",", ":"))
        return f"{self.target}-{hashlib.sha256(flags.encode()).hexdigest()[:KEY_DIGITS]}"


class Compiled(BaseModel):
    """A compiled form, as it is loaded.

    Args:
        files: in the candidate's folder, the one to load first; empty: the version's own file is loaded.
        backend: a name that workers.backends.get_backend takes.
        options: given to Backend.load.
        runtime: name and version of the library.
        notes: for the report.
        bounds: of inputs; others are no business of the form.
        rows_independent: rows of a run do not influence each other. If not, a version that batches may run only single
            rows with it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: Annotated[tuple[str, ...], Field(max_length=FILES_MAX)] = ()
    backend: str
    options: Flags = {}
    runtime: str
    notes: tuple[str, ...] = ()
    bounds: Bounds = {}
    rows_independent: bool = True


class Missing(NamedTuple):
    """Why a target cannot compile here, and what to install; `install` is empty if nothing would help."""

    why: str
    install: str = ""


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
    seconds_max: float = COMPILE_S_MAX
    memory_bytes: int = MEMORY_BYTES_MAX
    written_bytes: int = WRITTEN_BYTES_MAX
    low_priority: bool = True
    share: bool = False


class CompileOutcome(BaseModel):
    """What came of a compilation. The process says `compiled` or `error`; its caller adds the rest.

    Args:
        compiled: None if it failed.
        error: why it failed, on one line; empty if it did not.
        seconds: that it took.
        size_bytes: of the files of `compiled`.
        stderr: the end of its standard error.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    compiled: Compiled | None = None
    error: str = ""
    seconds: float = 0.0
    size_bytes: int = 0
    stderr: str = ""
