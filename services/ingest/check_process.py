"""Runs the checker in a process of its own, and always ends that process.

CheckTask ─> checker process (own session, low priority, bounded memory and time) ─> CheckedModel, or a Failure
The process is forked from one that has the libraries loaded (`ingest.fork_server`); where there is none, it is started.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import shutil
import signal
import sys
from functools import cache, partial
from pathlib import Path

from pydantic import ValidationError

from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.check_slots import check_slot
from millstream.services.ingest.forked_check import Forker, Program
from millstream.services.ingest.needed_files import keep_only
from millstream.services.ingest.report import (
    COMPILED,
    REWRITE_BYTES,
    UPLOAD,
    CheckedModel,
    CheckReport,
    CheckTask,
    Declared,
    Recognised,
    Rejection,
    printed,
)
from millstream.services.model.manifest import ROWS_MAX_DEFAULT
from millstream.services.repository.disk import storage_errors
from millstream.services.sandbox.child import IMPORT_ROOT, REPORT_BYTES_MAX, Ended, confined_environment, run_confined
from millstream.services.sandbox.group_watch import FolderWatch, GroupWatch
from millstream.services.settings import Settings

log = logging.getLogger("millstream.check")

#: Linux only: elsewhere libraries may start threads when they are imported, and a checker could not be told to end
FORKS = sys.platform.startswith("linux")
_FORK_ATTEMPTS = 2  # the first may find a fork server that is about to end, since it idles
_RETRY_S = 5.0
_MODULE = "millstream.services.ingest.checker"
_PROGRAM = Program(_MODULE, "millstream.services.ingest.rehearsal:rehearse")


async def check(task: CheckTask, seconds_max: float) -> CheckedModel:
    """Run the checker on `task` and return its report, as `examine` does, for what is served as it is."""
    outcome = await examine(task, seconds_max)
    if isinstance(outcome, Recognised):
        raise Failure(Code.INTERNAL, f"a {outcome.importer} model was to be served without a conversion")
    return outcome


async def examine(task: CheckTask, seconds_max: float) -> CheckedModel | Recognised:
    """Run the checker on `task` and return its report. Its process group has ended on return, error and cancellation.

    Raises:
        Failure: the checker's rejection; INVALID, if it crashed or exceeded `seconds_max`; INTERNAL, if it printed no
            valid report; UNAVAILABLE, if no process could be started.
    """
    try:
        async with asyncio.timeout(seconds_max):
            ended = await _forked(task) or await _started(task)
    except TimeoutError:
        raise _too_slow(seconds_max) from None
    # A report lists up to 10,001 files: parse it in a thread, so that it does not block the event loop.
    return await asyncio.to_thread(_outcome, ended, task, seconds_max)


async def end_fork_server() -> None:
    """End the process that checkers are forked from; the next check starts it again."""
    await asyncio.to_thread(_forker().close)


async def check_in_place(
    folder: Path,
    served: str,
    batching: bool | None,
    settings: Settings,
    rows_max: int = ROWS_MAX_DEFAULT,
    *,
    foreign: bool = False,
    declared: Declared = Declared(),  # noqa: B008 - frozen
) -> CheckedModel:
    """Check the model at `served` below `folder`, which stays where it is and is not written to.

    Takes a check slot and applies the same limits as for an upload. `batching` says whether requests should share
    runs; None lets the check decide. `foreign`: the folder is not of the repository, and may change meanwhile.
    `declared`: what the model's configuration says of its inputs and outputs. Raises Failure as `check` does.
    """
    task = CheckTask(
        folder=folder,
        batching=batching,
        rows_max=rows_max,
        unpacked_bytes_max=settings.upload_bytes_max,
        memory_bytes_max=settings.check_memory_bytes_max,
        cpu_s_max=int(settings.check_s_max) + 1,
        served=served,
        foreign=foreign,
        declared=declared,
    )
    async with check_slot():
        return await check(task, settings.check_s_max)


async def _forked(task: CheckTask) -> Ended | None:
    """Run a forked checker; return None where there is no fork server, or if it ends before the checker does."""
    if not FORKS:
        return None
    document = task.model_dump_json().encode()
    for _ in range(_FORK_ATTEMPTS):
        try:
            ended = await _forker().run(document, partial(_watch, task))
        except OSError as error:
            raise _not_started(error) from error
        if ended is not None:
            return ended
        await asyncio.to_thread(_undo, task)
    log.warning("the fork server of the model check ended; the check is repeated in a process of its own")
    return None


@cache
def _forker() -> Forker:
    forker = Forker(IMPORT_ROOT, _environment(), _PROGRAM)
    atexit.register(forker.close)
    return forker


def _undo(task: CheckTask) -> None:
    """Remove what a checker has written that did not end. Raises Failure(UNAVAILABLE) if the upload is gone."""
    if task.served is not None:
        return
    if task.imported is not None:
        shutil.rmtree(task.folder / COMPILED, ignore_errors=True)
        return
    if not (task.folder / UPLOAD).exists():  # it was unpacked
        raise Failure(Code.UNAVAILABLE, "the model check was interrupted: send the model again", retry_after_s=_RETRY_S)
    with storage_errors(task.folder):
        keep_only(task.folder, {UPLOAD})


async def _started(task: CheckTask) -> Ended:
    """Run a checker in a process that is started for it."""
    try:
        document, watch_of = task.model_dump_json().encode(), partial(_watch, task)
        return await run_confined(_MODULE, task.folder, document, _environment(), watch_of)
    except OSError as error:
        raise _not_started(error) from error


def _watch(task: CheckTask, leader: int) -> GroupWatch:
    """Return what bounds a check: the upload, what it unpacks, mends and rewrites; in place it may write nothing."""
    written = 4 * task.unpacked_bytes_max + REWRITE_BYTES
    folder = FolderWatch(task.folder if task.served is None else None, written)
    return GroupWatch(leader, folder, task.memory_bytes_max, alone=True)


def _not_started(error: OSError) -> Failure:
    return Failure(Code.UNAVAILABLE, f"the model check cannot be started: {error.strerror}", retry_after_s=_RETRY_S)


def _outcome(ended: Ended, task: CheckTask, seconds_max: float) -> CheckedModel | Recognised:
    report, errors, status, exceeded = ended
    if exceeded:
        raise invalid(f"the model check was ended: {exceeded}")
    if status == -signal.SIGXCPU:
        raise _too_slow(seconds_max)
    if status < 0:
        raise invalid(
            f"the model check was ended by {_signal_name(-status)}: the model crashes ONNX Runtime or needs more than "
            f"the {task.memory_bytes_max >> 20} MiB that a check may use (MILLSTREAM_CHECK_MEMORY_BYTES_MAX)"
        )
    if len(report) >= REPORT_BYTES_MAX:
        raise invalid(f"the model's inputs, outputs and files take more than {REPORT_BYTES_MAX} bytes to describe")
    try:
        outcome = CheckReport.model_validate_json(report).outcome
    except ValidationError:
        log.warning("the model check ended with status %d and printed: %s", status, printed(errors))
        message = f"the model check ended with status {status}; the log has what it printed"
        raise Failure(Code.INTERNAL, message) from None
    if isinstance(outcome, Rejection):
        raise Failure(outcome.code, outcome.message)
    return outcome


def _too_slow(seconds_max: float) -> Failure:
    return invalid(
        f"the model check took longer than {seconds_max:g} s: is the model too slow to serve? "
        "(MILLSTREAM_CHECK_S_MAX sets the limit)"
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _environment() -> dict[str, str]:
    # PyTorch makes a folder for its compiler, which the sandbox forbids, unless it is there.
    return confined_environment(TORCHINDUCTOR_CACHE_DIR="/")
