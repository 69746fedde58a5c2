"""The file by which a worker serves a function: what is imported, and in which environment."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from millstream.plugins.children.process import ChildProgram
from millstream.services.ingest.report import PathBelow
from millstream.services.model.manifest import COLUMNS_MAX, Batching, ColumnName, TrialInputs
from millstream.services.model.signature import Signature

FORMAT = "python"
Adapter = Literal["", "estimators", "archive_handlers", "pyfunc_models"]
#: models of Triton's Python backend
TRITON_FORMAT = "triton-python"
#: below the folder of a version
DOCUMENT = "imported/function.json"
_PROGRAM, _TRITON_PROGRAM = "millstream.plugins.functions.program", "millstream.plugins.functions.triton.program"
_BYTES_MAX = 8 << 20


class FunctionDocument(BaseModel):
    """A function as it was checked.

    Args:
        file: that is imported, below the version's folder.
        adapter: what makes a function of the file; empty: it defines one.
        importer: the name of the importer that it comes from.
        columns: names of the columns of the one input.
        network: its process may connect to other machines: it asked, and its uploader had the right.
        lock: of its environment, below the version's folder; empty: it has that of the server.
        streams: requests that it answers at once, in parts; 0: it answers each at once.
        kinds: of the elements of inputs and outputs, by name: "text", "json", "image", "bytes", "numbers".
        trial: inputs of one row that ran; None: no generated input runs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: PathBelow
    adapter: Adapter = ""
    importer: str = Field("", max_length=100)
    columns: tuple[ColumnName, ...] = Field((), max_length=COLUMNS_MAX)
    network: bool = False
    lock: str = Field("", max_length=100)
    signature: Signature
    streams: int = Field(0, ge=0)
    kinds: dict[str, str] = {}
    batching: Batching = Batching()
    trial: TrialInputs | None = None
    notes: tuple[str, ...] = ()
    producer: str = Field(max_length=1000)


class ServedFile(NamedTuple):
    """What a process serves: `name`, below a folder, and the adapter that makes a function of it.

    `beneath`: the packages of the server are there, too, behind those of its environment. `network`: as its document.
    """

    name: str
    adapter: str = ""
    beneath: bool = False
    network: bool = False


def served_file(document: FunctionDocument) -> ServedFile:
    """Return what a version serves: handlers find the packages of the server, as TorchServe's do, beside their own."""
    beneath = bool(document.lock) and document.adapter == "archive_handlers"
    return ServedFile(document.file, document.adapter, beneath, document.network)


def read_document(path: Path) -> FunctionDocument:
    """Return the document in a file. Raises ValueError, OSError."""
    with path.open("rb") as file:
        return FunctionDocument.model_validate_json(file.read(_BYTES_MAX))


class RunsIn(NamedTuple):
    """What the process of a function gets.

    Args:
        python: the interpreter of its environment.
        memory_bytes_max: that it may take.
        threads: of its libraries.
        unconfined: run it also where nothing confines it.
    """

    python: str
    memory_bytes_max: int
    threads: int
    unconfined: bool


def program_of(folder: Path, file: ServedFile, name: str, runs_in: RunsIn) -> ChildProgram:
    """Return the program that serves `file`, below the folder of a version."""
    paths = sysconfig.get_paths()
    beneath = sorted({Path(paths["purelib"]), Path(paths["platlib"])}) if file.beneath else []
    task = {"file": str((folder / file.name).resolve()), "adapter": file.adapter, "beneath": [*map(str, beneath)]}
    program = _program(name, _PROGRAM, task, folder, runs_in)
    return program._replace(reads=(*program.reads, *beneath), network=file.network)


def triton_program_of(path: Path, config: str, name: str, runs_in: RunsIn, *, complete: bool = False) -> ChildProgram:
    """Return the program that serves the model of Triton's Python backend at `path`, or has it complete its `config`.

    `name`: of the model.
    """
    task = {"file": str(path.resolve()), "config": config, "name": name, "complete": complete}
    return _program(name, _TRITON_PROGRAM, task, path.parents[1], runs_in)


def _program(name: str, module: str, task: dict[str, Any], folder: Path, runs_in: RunsIn) -> ChildProgram:
    threads = str(max(1, runs_in.threads))
    return ChildProgram(
        name=name,
        module=module,
        task=task,
        reads=(folder.resolve(),),
        memory_bytes_max=runs_in.memory_bytes_max,
        python=runs_in.python,
        variables=dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), threads),
        unconfined=runs_in.unconfined,
    )


def is_document(_: Path) -> bool:
    """Return False: no upload is one; the importer makes it."""
    return False
