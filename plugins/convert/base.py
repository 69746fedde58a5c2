"""The importers of this plug-in: their process recognises, converts and asks the framework (import_process).

Importer.run (gateway) ─> conversion ─> import_process (sandbox) ─> Importer.convert ─> Imported ─> Converted
A module of an importer imports its framework inside `convert` alone: recognition runs in the command line, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.services.errors import invalid
from millstream.services.ingest import importers
from millstream.services.ingest.importers import ImportOptions, Sample, Source
from millstream.services.model.manifest import ColumnCategories
from millstream.services.model.preparation import Preparation
from millstream.services.model.signature import Classes

if TYPE_CHECKING:
    from millstream.services.ingest.report import Converted, Recognised
    from millstream.services.settings import Settings

#: largest difference between the source framework's outputs and the converted model's, unless an importer says another
RTOL = 1e-3
ATOL = 1e-5
SCRATCH = "scratch"  # the folder of temporary files of frameworks, in the folder of an upload


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
        prepare: inputs that requests may give as encoded files.
        padded_max: tokens of a row up to which padding changes no answer; 0: it may.
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
    prepare: Mapping[str, Preparation] = MappingProxyType({})
    padded_max: int = 0


class Importer(importers.Importer):
    """Imports the models of one framework.

    Args:
        extra: of pyproject.toml, which installs what `convert` imports.
        modules: what must be importable where the gateway runs; otherwise the upload is refused with what to install.
        executes: whether converting may execute what was uploaded: most load what can name functions, or run a
            framework's graph. Others read numbers and names alone, or run what the model check runs, too.
        rehearsal: MODULE:FUNCTION that loads the framework in the process that imports are forked from; empty: each
            import starts a process of its own.
    """

    extra = "gateway"
    executes = True
    rehearsal = ""

    @property
    def modules(self) -> tuple[str, ...]:
        return ()

    def convert(self, source: Source, options: ImportOptions) -> Imported:
        """Convert the model, and run it in its framework for the samples. Runs in the sandbox, within limits.

        Raises Failure(INVALID) with what the owner can do.
        """
        raise NotImplementedError

    async def run(self, folder: Path, recognised: Recognised, options: ImportOptions, settings: Settings) -> Converted:
        from millstream.plugins.convert.conversion import convert

        return await convert(self, folder, recognised, options, settings)


def read_json(path: Path, bytes_max: int) -> Any:
    """Return the JSON document in a file. Raises Failure(INVALID), OSError."""
    if not path.is_file():
        raise invalid(f"the folder has no {path.name}")
    with path.open("rb") as file:
        return parse_json(file.read(bytes_max + 1), path.name, bytes_max)


def parse_json(content: bytes, what: str, bytes_max: int) -> Any:
    """Return a JSON document. Raises Failure(INVALID)."""
    if len(content) > bytes_max:
        raise invalid(f"{what} has more than {bytes_max} bytes")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise invalid(f"{what} is not JSON: {str(error)[:100]}") from error


def path_below(folder: Path, name: str, what: str) -> Path:
    """Return the path of a name below a folder. Raises Failure(INVALID) for one that leads out of it."""
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        raise invalid(f"{what} names {name[:80]!a}, which leads out of the folder: copy the file into it")
    return folder / pure
