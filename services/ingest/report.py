"""The messages to and from the checker process, as JSON. Pure.

ingest ── CheckTask (stdin) ──> checker process ── CheckReport (stdout) ──> ingest
A model may take over the checker, so a report is untrusted: every field is bounded, and paths stay below the folder.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from millstream.services.errors import Code
from millstream.services.model.formats import ONNX, formats
from millstream.services.model.manifest import (
    ROWS_MAX_DEFAULT,
    Batching,
    ImportFacts,
    ImportRecord,
    ModelConfig,
    TrialInputs,
    VersionPart,
    Warmup,
)
from millstream.services.model.signature import Classes, Signature

#: name of the uploaded file in the staging folder until the checker has unpacked it
UPLOAD = "upload"
#: folder of what the check has rewritten, in the version's folder
COMPILED = "compiled"
#: limits on the inputs and outputs of a model (together), on their names and on their shapes
TENSORS_MAX = 1024
NAME_CHARACTERS_MAX = 512
RANK_MAX = 32
#: requests that an instance answers at once, in parts
STREAMS_MAX = 1024
#: files of one version that a worker reads: the model and its weights
FILES_MAX = 10_001
#: how much larger than the upload limit a rewritten model may be
REWRITE_BYTES = 64 << 20
MESSAGE_CHARACTERS_MAX = 1000
#: runs of the source framework that a converted model is compared with
SAMPLES_MAX = 16
_NOTES_MAX = 16
_PATH_BYTES_MAX = 1200


def _below(path: str) -> str:
    pure = PurePosixPath(path)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts or not path.isprintable():
        raise ValueError("the path is not below the folder")
    if len(path.encode()) > _PATH_BYTES_MAX:
        raise ValueError("the path is too long")
    return str(pure)


def _known(source_format: str) -> str:
    if source_format != ONNX and source_format not in formats():
        raise ValueError("no plug-in adds this format")
    return source_format


SourceFormat = Annotated[str, AfterValidator(_known)]
PathBelow = Annotated[str, AfterValidator(_below)]
Text = Annotated[str, Field(max_length=MESSAGE_CHARACTERS_MAX)]


class Converted(ImportFacts):
    """What an importer has made of an upload. Paths are relative to the version folder.

    Args:
        served: the model file to serve.
        source_format: as in a manifest.
        files: further files that a worker reads.
        samples: files of inputs and of what the source framework answered (ingest/importers.py); none: the framework
            itself serves, and nothing was converted.
        classes: the output with a score for each class, whose names are in the file LABELS of importers.
    """

    served: PathBelow
    source_format: SourceFormat
    files: tuple[PathBelow, ...] = Field((), max_length=FILES_MAX)
    samples: tuple[PathBelow, ...] = Field(max_length=SAMPLES_MAX)
    notes: tuple[Text, ...] = Field((), max_length=_NOTES_MAX)
    classes: Classes | None = None


class Declared(BaseModel):
    """What a configuration says of the inputs and outputs of a model whose file may not say it.

    Args:
        shapes: by name; -1 for variable dimensions. They count where the file has no shape.
        inputs: names of inputs. One with a stored value is an input that a caller may set.
    """

    model_config = ConfigDict(frozen=True)

    shapes: dict[str, tuple[int, ...]] = {}
    inputs: frozenset[str] = frozenset()


class CheckTask(BaseModel):
    """The checker's input.

    Args:
        folder: the staging folder that holds the upload, or with `served` the folder of a model.
        batching: whether requests should share runs; None lets the check decide.
        rows_max: the rows of the largest run to try.
        warmup: requests that the version must be able to answer.
        served: path below `folder` of a model that is checked in place; `folder` is then not written to.
        foreign: `folder` is not in the repository, and may change during the check.
        imported: what an importer has made of the upload, which is checked in its place.
        declared: what the configuration of an ONNX model says of its inputs and outputs.
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
    foreign: bool = False
    imported: Converted | None = None
    declared: Declared = Declared()


class CheckedModel(BaseModel):
    """A model that passed the check. Paths are relative to the version folder.

    Args:
        files: all files that a worker reads.
        sources: the uploaded files that the model consists of.
        trial: inputs of one row that ran; None: no generated input runs.
        index_ranges: as in a manifest.
        source_format: as in a manifest.
        labels: files with the class names of outputs, one per line, by output.
        options: as in a manifest; the check does not know them, importers of what is code add them.
        parts, merged: as in a manifest; the check does not know them, the gateway adds them.
        streams: as in a manifest.
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
    trial: TrialInputs | None = None
    index_ranges: dict[str, tuple[int, int]] = {}
    source_format: SourceFormat = ONNX
    imported: ImportRecord | None = None
    labels: dict[str, PathBelow] = Field({}, max_length=TENSORS_MAX)
    parts: tuple[VersionPart, ...] = Field((), max_length=0)
    options: dict[str, str] = Field({}, max_length=0)
    merged: tuple[VersionPart, ...] = Field((), max_length=0)
    streams: int = Field(0, ge=0, le=STREAMS_MAX)

    @model_validator(mode="after")
    def _bounded(self) -> Self:
        specs = (*self.signature.inputs, *self.signature.outputs)
        if len(specs) > TENSORS_MAX or len(self.batching.reason) > MESSAGE_CHARACTERS_MAX:
            raise ValueError("the report is too large")
        if not self.index_ranges.keys() <= {spec.name for spec in self.signature.inputs}:
            raise ValueError("index_ranges names no input")
        if any(len(spec.name) > NAME_CHARACTERS_MAX or len(spec.shape) > RANK_MAX for spec in specs):
            raise ValueError("a tensor has a name or shape that is too long")
        return self


class Served(NamedTuple):
    """What an importer of code says of an upload, which is served as it is: the check could run nothing of it.

    Args:
        checked: how it is served.
        config: what its own configuration says; what the upload sets counts before it.
        triton: as in a manifest.
    """

    checked: CheckedModel
    config: ModelConfig
    triton: dict[str, Any]


class Recognised(BaseModel):
    """An unpacked upload that is a model of another framework: the name of its importer, and what it recognised.

    `notes`: on what is not served.
    """

    model_config = ConfigDict(frozen=True)

    importer: Text
    path: PathBelow
    notes: tuple[Text, ...] = Field((), max_length=_NOTES_MAX)


class Rejection(BaseModel):
    """Why a model cannot be served: the code and message of a Failure."""

    model_config = ConfigDict(frozen=True)

    code: Code
    message: Text


class CheckReport(BaseModel):
    """The checker's output."""

    model_config = ConfigDict(frozen=True)

    outcome: CheckedModel | Recognised | Rejection


def one_line(text: str) -> str:
    """Return `text` on one line, printable and bounded: messages quote untrusted names, and are logged."""
    line = " ".join(text.split())[:MESSAGE_CHARACTERS_MAX]
    return "".join(character if character.isprintable() else "?" for character in line)


def printed(errors: bytes) -> str:
    """Return the end of what a process wrote to its standard error, for the log: on one line, printable, bounded."""
    return one_line(errors.decode(errors="replace")[-MESSAGE_CHARACTERS_MAX:])
