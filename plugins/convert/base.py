"""What an importer is: it recognises a framework's files by their content, and converts them to a form that is served.

Source ─> recognises ─> convert ─> Imported (the converted model, and samples that the source framework answered)
A module of an importer imports its framework inside `convert` alone: recognition runs in the command line, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from millstream.services.model.classes import Classes
from millstream.services.model.manifest import ColumnCategories

Array = np.ndarray[Any, Any]

#: largest difference between the source framework's outputs and the converted model's, unless an importer says another
RTOL = 1e-3
ATOL = 1e-5
INPUTS_MAX = 64  # that an upload may declare
#: folders in the folder of an upload: the uploaded files, the converted ones, and temporary ones of frameworks
SOURCE = "source"
IMPORTED = "imported"
LABELS = f"{IMPORTED}/labels.txt"
SCRATCH = "scratch"


class Source(NamedTuple):
    """What an importer is asked about.

    Args:
        folder: the folder of the upload; the uploaded files are below `folder / SOURCE`.
        path: the file, or the root of the folder, to recognise.
    """

    folder: Path
    path: Path


class ImportOptions(BaseModel):
    """What the caller of an upload allows. Nothing of the upload is executed otherwise."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allow_pickle: bool = Field(False, description="Load pickles, in the sandbox, and classes of a list alone.")
    allow_code: bool = Field(False, description="Run code that a model folder brings with it, in the sandbox.")
    inputs: tuple[str, ...] = Field(
        (), max_length=INPUTS_MAX, description='Inputs that a file does not describe, such as "x:FP32:-1,3,224,224".'
    )
    formats: frozenset[str] = Field(
        frozenset(), description="Formats that the version's pools load, as far as is known; empty: any."
    )


class Sample(NamedTuple):
    """Inputs and what the source framework answered, as arrays by name with rows in the first dimension.

    Text is an array of str (datatype kind U).
    """

    inputs: Mapping[str, Array]
    outputs: Mapping[str, Array]


class Imported(NamedTuple):
    """A converted model.

    Args:
        path: the model file to serve, below `source.folder / IMPORTED`.
        format: how it is served: "onnx", "torch-export", "openvino" or "jax-export".
        samples: at least one; of several rows where the model takes rows, and with varied values.
        producer: source framework and converter with their versions: "scikit-learn 1.9.0, skl2onnx 1.20.0".
        notes: remarks for the owner, one sentence each.
        files: further files that a worker reads, such as weights, below `source.folder`.
        rtol: largest relative difference between outputs.
        atol: largest absolute difference between outputs, added to the relative one.
        columns: names of the columns of the table that the model takes: of the one input, in its order, or each an
            input; empty: they have none.
        columns_without_null: those in which a DataFrame may have no null.
        categories: by name, of the columns that have them.
        embeddings: outputs whose rows are directions: which of their elements is the largest means nothing.
        classes: the output with a score for each class; None: the model is no classifier.
        labels: names of the classes, a line of text each.
    """

    path: Path
    format: str
    samples: Sequence[Sample]
    producer: str
    notes: Sequence[str] = ()
    files: Sequence[Path] = ()
    rtol: float = RTOL
    atol: float = ATOL
    columns: Sequence[str] = ()
    columns_without_null: Sequence[str] = ()
    categories: Mapping[str, ColumnCategories] = MappingProxyType({})
    embeddings: Sequence[str] = ()
    classes: Classes | None = None
    labels: Sequence[str] = ()


class Importer(Protocol):
    """Imports the models of one framework.

    Args:
        name: the framework's name, for people: "scikit-learn".
        extra: of pyproject.toml, which installs what `convert` imports.
        modules: what must be importable where the gateway runs; otherwise the upload is refused with what to install.
    """

    @property
    def name(self) -> str: ...

    @property
    def extra(self) -> str: ...

    @property
    def modules(self) -> tuple[str, ...]: ...

    def recognises(self, source: Source) -> bool:
        """Return whether `source.path` is a model of this framework, judging by its content; executes nothing of it.

        Cheap, and with the standard library alone. Raises OSError if the content cannot be read.
        """

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        """Convert the model, and run it in its framework for the samples. Runs in the sandbox, within limits.

        Raises Failure(INVALID) with what the owner can do.
        """


class Members(NamedTuple):
    """What in a folder is the model: patterns of `Path.glob`, and notes on what is not served."""

    patterns: Sequence[str]
    notes: tuple[str, ...] = ()


@runtime_checkable
class FolderImporter(Importer, Protocol):
    """An importer of folders, which says what in them is the model: nothing else is sent."""

    def members(self, folder: Path) -> Members:
        """Return the model's files in a folder that it recognises.

        Standard library alone. Raises Failure(INVALID) for a folder whose document does not say it; OSError.
        """
