"""The checker process: unpacks an upload, rejects models that cannot be served, and reports how to serve the others.

python -m millstream.services.ingest.checker FOLDER --parent PID
CheckTask (JSON on standard input) ─> sandbox ─> unpack ─> inspect ─> CheckReport (JSON on standard output)
                                                        └> a model of another framework: which importer converts it
It runs untrusted models in native code that may crash or hang; `ingest.check_process` starts it, or has it forked by
`ingest.fork_server`, and enforces limits.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.archive import check_kind, unpack
from millstream.services.ingest.importers import SOURCE, resolve
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
from millstream.services.model.formats import format_of, formats
from millstream.services.plugin.plugin import Format
from millstream.services.plugin.registry import load_for
from millstream.services.process.threads import NICE
from millstream.services.repository.disk import is_of_disk, storage_failure
from millstream.services.sandbox.confine import Limits, confine, serve_forked

_REFUSED = frozenset({errno.EACCES, errno.EPERM})


def main(set_title: Callable[..., None] | None = None) -> NoReturn:
    """Check one model. Exits with 0 if it printed a report. `set_title`: as in `serve_forked`."""
    serve_forked(
        lambda task: _report(task).model_dump_json().encode(), CheckTask.model_validate_json, __name__, set_title
    )


def _confine(task: CheckTask) -> None:
    """Limit the memory, CPU time and files of this process, since a model may take it over. Raises Failure."""
    os.nice(NICE)
    limits = Limits(task.memory_bytes_max, task.cpu_s_max, task.unpacked_bytes_max + REWRITE_BYTES)
    folder = task.folder.resolve()
    try:
        if task.served is None:
            confine(reads=(), writes=(folder,), limits=limits)
        else:  # served in place: the operator's folder, in which the model file may be a link to another folder
            confine(reads=(folder, (folder / task.served).resolve()), writes=(), limits=limits)
    except OSError as error:
        message = f"the sandbox of the model check cannot be set up: {error}; `millstream doctor` shows what is missing"
        raise Failure(Code.INTERNAL, message) from error


def _report(task: CheckTask) -> CheckReport:
    try:
        resolve()
        _confine(task)
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
        elif is_of_disk(error) or error.errno in _REFUSED:
            rejection = storage_failure(error, task.folder)
        else:  # the model names a file that cannot be
            rejection = invalid(f"the model cannot be read: {error.strerror or error}")
    except Exception as error:  # any other exception of a library: the model is malformed
        rejection = invalid(f"the model cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return CheckReport(outcome=Rejection(code=rejection.code, message=one_line(rejection.message)))


def _check(task: CheckTask) -> CheckedModel | Recognised:
    if _address_space_bytes() > task.memory_bytes_max:  # nothing can be read any more
        raise ImportError("no memory left")
    found_notes: tuple[str, ...] = ()
    if task.served is not None:
        path = task.folder / task.served
        found_format = format_of(path)
        if found_format is None:
            check_kind(path)
    elif task.imported is not None:
        path = task.folder / task.imported.served
        found_format = formats().get(task.imported.source_format)
    else:
        found = unpack(task.folder / UPLOAD, task.folder / SOURCE, task.unpacked_bytes_max)
        path, found_notes = found.path, found.notes
        if found.importer is not None:
            path_below = str(path.relative_to(task.folder))
            return Recognised(importer=found.importer.name, path=path_below, notes=tuple(map(one_line, found_notes)))
        found_format = format_of(path)
    checked = _inspect(task, path, found_format)
    batching = checked.batching.model_copy(update={"reason": one_line(checked.batching.reason)})
    notes = tuple(one_line(note) for note in (*found_notes, *checked.notes))
    return checked.model_copy(update={"batching": batching, "notes": notes, "producer": one_line(checked.producer)})


def _inspect(task: CheckTask, path: Path, of: Format | None) -> CheckedModel:
    # Imported here, after the archive was checked and inside the memory limit: these libraries are large. The fork
    # server has imported them already.
    try:
        from millstream.services.ingest.inspection import inspect

        inspect = inspect if of is None else load_for(of, of.inspect)
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
