"""What is compiled, how, and what came of it. Pure.

Subject ─> Target.candidates ─> Candidate ─> Target.compile ─> Compiled, which names a backend, files and options
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
