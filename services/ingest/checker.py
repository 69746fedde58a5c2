"""The checker process: unpacks an upload, rejects models that cannot be served, and reports how to serve the others.

python -m millstream.services.ingest.checker FOLDER PARENT
CheckTask (JSON on standard input) ─> sandbox ─> unpack ─> inspect ─> CheckReport (JSON on standard output)
                                                        └> a model of another framework: which importer converts it
It runs untrusted models in native code that may crash or hang; `ingest.check_process` starts it, or has it forked by
`ingest.fork_server`, and enforces limits.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from millstream.plugins.convert.base import SOURCE
from millstream.plugins.engines.jax.document import is_export_file
from millstream.plugins.engines.torch.archive import is_program_file
from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.archive import check_kind, unpack
from millstream.services.ingest.report import (
    REWRITE_BYTES,
    UPLOAD,
    CheckedModel,
    CheckReport,
    CheckTask,
    Recognised,
    Rejection,
    one_line,
)
from millstream.services.process.low_priority import NICE
from millstream.services.repository.disk import storage_failure
from millstream.services.sandbox.confine import Limits, confine, serve_forked


def main(set_title: Callable[..., None] | None = None) -> NoReturn:
    """Check one model. Exits with 0 if it printed a report. `set_title`: as in `serve_forked`."""
    serve_forked(
        lambda task: _report(task).model_dump_json().encode(), CheckTask.model_validate_json, __name__, set_title
    )


def _confine(task: CheckTask) -> None:
    """Limit the memory, CPU time and files of this process, since a model may take it over. Raises OSError."""
    os.nice(NICE)
    limits = Limits(task.memory_bytes_max, task.cpu_s_max, task.unpacked_bytes_max + REWRITE_BYTES)
    folder = task.folder.resolve()
    if task.served is None:
        confine(reads=(), writes=(folder,), limits=limits)
    else:  # served in place: the operator's folder, in which the model file may be a link to another folder
        confine(reads=(folder, (folder / task.served).resolve()), writes=(), limits=limits)


def _report(task: CheckTask) -> CheckReport:
    try:
        _confine(task)
    except OSError as error:
        message = f"the sandbox of the model check cannot be set up: {error}; `millstream doctor` shows what is missing"
        return CheckReport(outcome=Rejection(code=Code.INTERNAL, message=one_line(message)))
    try:
        return CheckReport(outcome=_check(task))
    except Failure as failure:
        rejection = failure
    except MemoryError:
        rejection = invalid(f"the model needs more than the {task.memory_bytes_max >> 20} MiB that a check may use")
    except ImportError as error:
        rejection = Failure(
            Code.INTERNAL,
            f"the model check cannot load its libraries ({error}): install millstream[cpu] or millstream[gpu], and "
            f"allow it more than {task.memory_bytes_max >> 20} MiB (MILLSTREAM_CHECK_MEMORY_BYTES_MAX)",
        )
    except OSError as error:
        if task.foreign and isinstance(error, FileNotFoundError):
            name = Path(str(error.filename or task.served)).name
            rejection = invalid(f"{name} was removed while it was read: load the model when its files are complete")
        else:
            rejection = storage_failure(error, task.folder)
    except Exception as error:  # any other exception of a library: the model is malformed
        rejection = invalid(f"the model cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return CheckReport(outcome=Rejection(code=rejection.code, message=one_line(rejection.message)))


def _check(task: CheckTask) -> CheckedModel | Recognised:
    if _address_space_bytes() > task.memory_bytes_max:  # nothing can be read any more
        raise ImportError("no memory left")
    found_notes: tuple[str, ...] = ()
    if task.served is not None:
        path = task.folder / task.served
        if path.suffix != ".xml":
            check_kind(path)
    elif task.imported is not None:
        path = task.folder / task.imported.served
    else:
        found = unpack(task.folder / UPLOAD, task.folder / SOURCE, task.unpacked_bytes_max)
        path, found_notes = found.path, found.notes
        if found.importer is not None:
            path_below = str(path.relative_to(task.folder))
            return Recognised(importer=found.importer.name, path=path_below, notes=tuple(map(one_line, found_notes)))
    checked = _inspect(task, path)
    batching = checked.batching.model_copy(update={"reason": one_line(checked.batching.reason)})
    notes = tuple(one_line(note) for note in (*found_notes, *checked.notes))
    return checked.model_copy(update={"batching": batching, "notes": notes, "producer": one_line(checked.producer)})


def _inspect(task: CheckTask, path: Path) -> CheckedModel:
    # Imported here, after the archive was checked and inside the memory limit: these libraries are large. The fork
    # server has imported them already.
    try:
        from millstream.services.ingest.inspection import inspect

        if is_program_file(path):
            from millstream.plugins.engines.torch.inspection import inspect
        elif is_export_file(path):
            from millstream.plugins.engines.jax.inspection import inspect
        elif path.suffix == ".xml":  # an importer wrote it
            from millstream.plugins.engines.openvino.inspection import inspect
    except (MemoryError, SystemError) as error:  # SystemError: C code of a library that ran out of memory
        raise ImportError("no memory left") from error
    return inspect(task, path)


def _address_space_bytes() -> int:
    """Return the size of this process's address space, which RLIMIT_AS limits; 0 if unknown."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


if __name__ == "__main__":
    main()
