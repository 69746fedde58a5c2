"""What the checker is asked and what it answers, as JSON between two processes. Pure.

ingest ── CheckTask (argument) ──> checker process ── CheckReport (stdout) ──> ingest
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from services.errors import Code
from services.manifest import ROWS_MAX_DEFAULT, Warmup
from services.tensor import Signature

#: name of the uploaded file in the staging folder, until the checker has unpacked it
UPLOAD = "upload"


class CheckTask(BaseModel):
    """`folder`: a staging folder that holds the upload. `batching`: None lets the check find out.

    `rows_max`: the largest run to try. `warmup`: requests that the version must be able to answer.
    `served`: the model's path below `folder`, which holds no upload then but a model's files, and is not written to.
    """

    model_config = ConfigDict(frozen=True)

    folder: Path
    batching: bool | None
    unpacked_bytes_max: int
    memory_bytes_max: int
    cpu_s_max: int
    rows_max: int = ROWS_MAX_DEFAULT
    warmup: tuple[Warmup, ...] = ()
    served: str | None = None


class Checked(BaseModel):
    """A model that may be served. Paths are below the version folder; `files`: all that a worker reads."""

    model_config = ConfigDict(frozen=True)

    served: str
    files: tuple[str, ...]
    signature: Signature
    opset: int
    ir_version: int
    producer: str
    notes: tuple[str, ...]


class Refused(BaseModel):
    """Why a model is not served: the code and message of a Failure."""

    model_config = ConfigDict(frozen=True)

    code: Code
    message: str


class CheckReport(BaseModel):
    """The checker's one line of output."""

    model_config = ConfigDict(frozen=True)

    outcome: Checked | Refused
