"""What the checker is asked and what it answers, as JSON between two processes. Pure.

ingest ── CheckTask (stdin) ──> checker process ── CheckReport (stdout) ──> ingest
A model may take the checker over, so a report is bounded in everything, and its paths stay below the folder.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from millstream.services.errors import Code
from millstream.services.model.manifest import ROWS_MAX_DEFAULT, Batching, Warmup
from millstream.services.model.signature import Signature

#: name of the uploaded file in the staging folder, until the checker has unpacked it
UPLOAD = "upload"
#: inputs and outputs of a model, and how long their names and shapes may be
TENSORS_MAX = 1024
NAME_CHARACTERS_MAX = 512
RANK_MAX = 32
#: files that a worker reads of one version
FILES_MAX = 10_001
MESSAGE_CHARACTERS_MAX = 1000
_NOTES_MAX = 16
_PATH_BYTES_MAX = 1200


def _below(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or not path.isprintable():
        raise ValueError("not a path below the folder")
    if len(path.encode()) > _PATH_BYTES_MAX:
        raise ValueError("a path that is too long")
    return str(pure)


PathBelow = Annotated[str, AfterValidator(_below)]
Text = Annotated[str, Field(max_length=MESSAGE_CHARACTERS_MAX)]


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
    """A model that may be served. Paths are below the version folder.

    `files`: all that a worker reads. `sources`: of what was uploaded, all that the model consists of.
    """

    model_config = ConfigDict(frozen=True)

    served: PathBelow
    files: tuple[PathBelow, ...] = Field(max_length=FILES_MAX)
    sources: tuple[PathBelow, ...] = Field(max_length=FILES_MAX)
    signature: Signature
    opset: int
    ir_version: int
    producer: Text
    batching: Batching
    notes: tuple[Text, ...] = Field(max_length=_NOTES_MAX)

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        specs = (*self.signature.inputs, *self.signature.outputs)
        if len(specs) > TENSORS_MAX or len(self.batching.reason) > MESSAGE_CHARACTERS_MAX:
            raise ValueError("a report that is too large")
        if any(len(spec.name) > NAME_CHARACTERS_MAX or len(spec.shape) > RANK_MAX for spec in specs):
            raise ValueError("a tensor with a name or shape that is too long")
        return self


class Rejection(BaseModel):
    """Why a model is not served: the code and message of a Failure."""

    model_config = ConfigDict(frozen=True)

    code: Code
    message: Text


class CheckReport(BaseModel):
    """The checker's one line of output."""

    model_config = ConfigDict(frozen=True)

    outcome: Checked | Rejection
