"""The checker process: unpacks an upload, refuses what cannot be served, and says how the rest is served.

python -m millstream.services.ingest.checker FOLDER    a CheckTask in JSON on standard input; prints a CheckReport in JSON
Runs what strangers sent in native code that may crash or never end: millstream.services.ingest.check_process starts and bounds it.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.archive import unpack
from millstream.services.ingest.report import MESSAGE_CHARACTERS_MAX, UPLOAD, Checked, CheckReport, CheckTask, Rejection
from millstream.services.repository.disk import storage_failure
from millstream.services.sandbox.confine import confine

_NICE = 10
#: by how much a rewritten model may be larger than all that was uploaded
_REWRITE_BYTES = 64 << 20
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Check one upload. Exits with 0 whenever there is a report."""
    task = CheckTask.model_validate_json(sys.stdin.buffer.read())
    output = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not mix with the report
    report = _report(task).model_dump_json().encode()
    with os.fdopen(output, "wb") as file:
        file.write(report)
    os._exit(0)  # libraries that a broken model left in a bad state need not be taken down in order


def _confine(task: CheckTask) -> None:
    """Bound what this process takes and reaches: a model may take it over. Raises OSError."""
    os.nice(_NICE)
    for limit, value in (
        (resource.RLIMIT_AS, task.memory_bytes_max),
        (resource.RLIMIT_CPU, task.cpu_s_max),
        (resource.RLIMIT_FSIZE, task.unpacked_bytes_max + _REWRITE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with suppress(OSError):  # when memory runs out, this is the process to go
            Path("/proc/self/oom_score_adj").write_text("1000")
    folder = task.folder.resolve()
    if task.served is None:
        confine(reads=(), writes=(folder,))
    else:  # the operator's own folder, where the file itself may be a link to elsewhere
        confine(reads=(folder, (folder / task.served).resolve()), writes=())


def _report(task: CheckTask) -> CheckReport:
    try:
        _confine(task)
    except OSError as error:
        message = f"the sandbox of the model check cannot be set up: {error}; `millstream doctor` says what is missing"
        return CheckReport(outcome=Rejection(code=Code.INTERNAL, message=_one_line(message)))
    try:
        return CheckReport(outcome=_check(task))
    except Failure as failure:
        refusal = failure
    except MemoryError:
        refusal = invalid(f"the model needs more than the {task.memory_bytes_max >> 20} MiB that a check may use")
    except ImportError as error:
        refusal = Failure(
            Code.INTERNAL,
            f"the model check cannot load its libraries ({error}): install millstream[cpu] or millstream[gpu], and allow it "
            f"more than {task.memory_bytes_max >> 20} MiB (MILLSTREAM_CHECK_MEMORY_BYTES_MAX)",
        )
    except OSError as error:
        refusal = storage_failure(error, task.folder)
    except Exception as error:  # a library that trips over a model trips over what its author made
        refusal = invalid(f"the model cannot be read: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return CheckReport(outcome=Rejection(code=refusal.code, message=_one_line(refusal.message)))


def _check(task: CheckTask) -> Checked:
    if task.served is not None:
        path = task.folder / task.served
    else:
        path = unpack(task.folder / UPLOAD, task.folder / "source", task.unpacked_bytes_max)
    # Loaded after the archive was looked at, and inside the limits: these libraries are large.
    try:
        from millstream.services.ingest.inspection import inspect
    except (MemoryError, SystemError) as error:  # a library's C code fails without saying why when memory runs out
        raise ImportError("no memory left") from error
    checked = inspect(task, path)
    batching = checked.batching.model_copy(update={"reason": _one_line(checked.batching.reason)})
    notes = tuple(_one_line(note) for note in checked.notes)
    return checked.model_copy(update={"batching": batching, "notes": notes, "producer": _one_line(checked.producer)})


def _one_line(text: str) -> str:
    """Messages quote names that a stranger chose: nothing in them may break a log line or fill a screen."""
    shown = " ".join(text.split())[:MESSAGE_CHARACTERS_MAX]
    return "".join(character if character.isprintable() else "?" for character in shown)


if __name__ == "__main__":
    main()
