"""The process that converts a model of another framework, which may execute what was uploaded.

python -m millstream.plugins.convert.import_process FOLDER --parent PID, or forked where the framework is loaded already
ImportTask (JSON on standard input) ─> sandbox ─> Importer.convert ─> samples to files ─> ImportReport (standard output)
`convert.conversion` starts it and enforces limits. A model may take it over, so its report is untrusted: every field is
bounded, and paths stay below the folder.
"""

from __future__ import annotations

import errno
import os
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb
from typing import NoReturn

from pydantic import BaseModel, ConfigDict

from millstream.plugins.convert.base import SCRATCH, Imported, Importer
from millstream.services.environment import ENVIRONMENT
from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.importers import (
    IMPORTED,
    LABELS,
    ImportOptions,
    Source,
    importers,
    resolve,
    write_samples,
)
from millstream.services.ingest.report import SAMPLES_MAX, Converted, PathBelow, Rejection, Text, one_line
from millstream.services.model.manifest import CATEGORIES_MAX, COLUMNS_MAX, ColumnCategories
from millstream.services.process.threads import NICE
from millstream.services.repository.disk import is_full, is_of_disk, storage_failure
from millstream.services.sandbox.confine import Layers, Limits, confine, serve_forked

_CAUSE_CHARACTERS_MAX = 400
_NAME_CHARACTERS_MAX = 512  # of a column or a category, as in a manifest
#: variables of the folders that frameworks write to
_FOLDERS = ("TMPDIR", "HOME", "XDG_CACHE_HOME", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR", "KERAS_HOME")
#: what the sandbox answers to calls that it forbids
_SANDBOX = frozenset({errno.EACCES, errno.EPERM})


class ImportTask(BaseModel):
    """The input of the import process.

    Args:
        folder: the staging folder of the upload.
        importer: the name of the importer that recognised it.
        path: what it recognised, below `folder`.
        options: what the caller allows.
        unconfined: convert what may execute code also where the kernel confines no process.
    """

    model_config = ConfigDict(frozen=True)

    folder: Path
    importer: Text
    path: PathBelow
    options: ImportOptions
    memory_bytes_max: int
    cpu_s_max: int
    file_bytes_max: int
    unconfined: bool = False


class ImportReport(BaseModel):
    """The output of the import process."""

    model_config = ConfigDict(frozen=True)

    outcome: Converted | Rejection


def main(set_title: Callable[..., None] | None = None) -> NoReturn:
    """Convert one model. Exits with 0 if it printed a report. `set_title`: as in `serve_forked`."""
    serve_forked(
        lambda task: _report(task).model_dump_json().encode(), ImportTask.model_validate_json, __name__, set_title
    )


def _report(task: ImportTask) -> ImportReport:
    resolve()
    importer = importers()[task.importer]
    assert isinstance(importer, Importer)
    try:
        return ImportReport(outcome=_convert(task, importer, _confine(task)))
    except Failure as failure:
        rejection = failure
    except Exception as error:  # any exception of a framework: the model cannot be converted
        rejection = _refusal(error, task, importer)
    return ImportReport(outcome=Rejection(code=rejection.code, message=one_line(rejection.message)))


def _refusal(error: Exception, task: ImportTask, importer: Importer) -> Failure:
    """Return what an exception of a framework says of the model."""
    if isinstance(error, MemoryError):
        return invalid(f"the model needs more than the {task.memory_bytes_max >> 20} MiB that an import may use")
    if isinstance(error, RecursionError):
        return invalid(f"the {importer.name} model is nested too deeply")
    if isinstance(error, OSError):
        return storage_failure(error, task.folder) if is_of_disk(error) else _of_model(error, importer)
    if isinstance(error, ImportError):
        return _of_import(error, importer, task.memory_bytes_max)
    if is_full(task.folder):  # frameworks in C++ say so in words of their own
        return storage_failure(OSError(errno.ENOSPC, ""), task.folder)
    cause = f"{type(error).__name__}: {' '.join(str(error).split())[:_CAUSE_CHARACTERS_MAX]}"
    if isinstance(error, SystemError):  # code in C that ran out of memory, or was called in a wrong way
        cause += f"; {task.memory_bytes_max >> 20} MiB may be too little (twice MILLSTREAM_CHECK_MEMORY_BYTES_MAX)"
    return invalid(f"the {importer.name} model cannot be converted: {cause}")


def _of_import(error: ImportError, importer: Importer, memory_bytes_max: int) -> Failure:
    """Return the refusal of a model whose conversion imports what is missing, or does not fit into memory."""
    if isinstance(error, ModuleNotFoundError):
        return invalid(
            f"importing this {importer.name} model needs {error.name or error}, which the gateway does not have: "
            f"pip install 'millstream[{importer.extra}]' where it runs"
        )
    return invalid(
        f"{importer.name} cannot be loaded ({error}): is millstream[{importer.extra}] installed where the gateway "
        f"runs, and are {memory_bytes_max >> 20} MiB enough (twice MILLSTREAM_CHECK_MEMORY_BYTES_MAX)?"
    )


def _of_model(error: OSError, importer: Importer) -> Failure:
    """Return the refusal of a model that names a file that cannot be, or that the sandbox forbids."""
    if error.errno in _SANDBOX:
        at = next(
            reversed(extract_tb(error.__traceback__)), None
        )  # says which call, if the framework's own is at fault
        where = f" at {Path(at.filename).name}:{at.lineno}, {at.name}" if at is not None else ""
        return invalid(
            f"the {importer.name} model uses a file, process or network outside of its upload, which the sandbox of "
            f"the import forbids ({error.strerror}{where}): save the model without it"
        )
    name = f" ({Path(os.fsdecode(error.filename)).name[:80]!a})" if isinstance(error.filename, str | bytes) else ""
    return invalid(f"the {importer.name} model cannot be read: {error.strerror or str(error)[:200]}{name}")


def _confine(task: ImportTask) -> Layers:
    os.nice(max(0, NICE - os.getpriority(os.PRIO_PROCESS, 0)))  # one that was forked has it already
    (task.folder / SCRATCH).mkdir(exist_ok=True)
    (task.folder / IMPORTED).mkdir(exist_ok=True)
    tempfile.tempdir = str(task.folder / SCRATCH)
    ENVIRONMENT.update(dict.fromkeys(_FOLDERS, tempfile.tempdir))  # which libraries read when they are loaded
    folder = task.folder.resolve()
    limits = Limits(task.memory_bytes_max, task.cpu_s_max, task.file_bytes_max)
    try:
        return confine(reads=(folder,), writes=(folder / SCRATCH, folder / IMPORTED), limits=limits)
    except OSError as error:
        message = f"the sandbox of the import cannot be set up: {error}; `millstream doctor` shows what is missing"
        raise Failure(Code.INTERNAL, message) from error


def _convert(task: ImportTask, importer: Importer, layers: Layers) -> Converted:
    if not (layers.stand or task.unconfined) and importer.executes:
        raise Failure(
            Code.UNSUPPORTED,
            f"importing a {importer.name} model may execute code, which nothing confines on this machine: `millstream "
            "doctor` says what is missing, and MILLSTREAM_UNCONFINED_IMPORTS=accept takes the risk",
        )
    missing = [module for module in importer.modules if find_spec(module) is None]
    if missing:
        raise invalid(
            f"importing a {importer.name} model needs {', '.join(missing)}, which the gateway does not have: "
            f"pip install 'millstream[{importer.extra}]' where it runs",
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        imported = importer.convert(Source(task.folder, task.folder / task.path), task.options)
    return _converted(task.folder, importer, imported)


def _converted(folder: Path, importer: Importer, imported: Imported) -> Converted:
    if not imported.samples:
        raise Failure(Code.INTERNAL, f"the importer of {importer.name} gave no sample")
    if imported.classes is not None:
        (folder / LABELS).write_text("".join(f"{label}\n" for label in imported.labels), encoding="utf-8")
    return Converted(
        served=str(imported.path.relative_to(folder)),
        source_format=imported.format,
        files=tuple(str(path.relative_to(folder)) for path in imported.files),
        samples=tuple(write_samples(folder, imported.samples[:SAMPLES_MAX])),
        importer=importer.name,
        producer=one_line(imported.producer),
        notes=tuple(one_line(note) for note in imported.notes),
        rtol=imported.rtol,
        atol=imported.atol,
        columns=_checked_names(imported.columns),
        columns_without_null=tuple(imported.columns_without_null),
        categories=_kept_categories(imported.categories),
        embeddings=tuple(imported.embeddings),
        classes=imported.classes,
        prepare=dict(imported.prepare),
        padded_max=imported.padded_max,
    )


def _checked_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of columns. Raises Failure(INVALID) for those that a manifest does not hold, or one twice."""
    if len(names) > COLUMNS_MAX:
        raise invalid(f"the model has {len(names)} columns with names: at most {COLUMNS_MAX}; fit it without names")
    if any(len(name) > _NAME_CHARACTERS_MAX for name in names):
        raise invalid(f"a column of the model has a name of more than {_NAME_CHARACTERS_MAX} characters")
    if len(set(names)) < len(names):
        (twice, _), *_ = Counter(names).most_common(1)
        raise invalid(f"the model has two columns of the name {twice[:80]!a}: fit it with a name for each")
    return tuple(names)


def _kept_categories(categories: Mapping[str, ColumnCategories]) -> dict[str, ColumnCategories]:
    """Return the categories of columns; without values where a manifest does not hold them all."""
    fits = sum(len(one.values) for one in categories.values()) <= CATEGORIES_MAX
    fits &= all(
        len(value) <= _NAME_CHARACTERS_MAX
        for one in categories.values()
        for value in one.values
        if isinstance(value, str)
    )
    return {name: one if fits else one.model_copy(update={"values": ()}) for name, one in categories.items()}


if __name__ == "__main__":
    main()
