"""Runs the checker in a process of its own, and always ends that process.

CheckTask ─> checker process (own session, low priority, bounded memory and time) ─> CheckedModel, or a Failure
The process is forked from one that has the libraries loaded (`ingest.fork_server`); where there is none, it is started.

Each check takes a core and memory, so few run at once. One that runs for longer than LONG_CHECK_S frees its slot for
the next, so that a model whose check never ends does not block uploads or the other models of a repository. The first
check of a caller does not wait for many of another.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.archive import keep_only
from millstream.services.ingest.forked_check import ForkedProgram, Forker, forker_of
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
from millstream.services.model.formats import formats
from millstream.services.model.manifest import ROWS_MAX_DEFAULT
from millstream.services.process.audit import caller
from millstream.services.process.caller_slots import CallerSlots
from millstream.services.repository.disk import storage_errors
from millstream.services.sandbox.child import REPORT_BYTES_MAX, Ended, confined_environment, run_confined
from millstream.services.sandbox.group_watch import FolderWatch, GroupWatch
from millstream.services.settings import Settings

log = logging.getLogger("millstream.check")

#: Linux only: elsewhere libraries may start threads when they are imported, and a checker could not be told to end
FORKS = sys.platform.startswith("linux")
_FORK_ATTEMPTS = 2  # the first may find a fork server that is about to end, since it idles
_RETRY_S = 5.0
_MODULE = "millstream.services.ingest.checker"
_PROGRAM = ForkedProgram(_MODULE, "millstream.services.ingest.inspection:rehearse")
#: slots: checks younger than LONG_CHECK_S that run at once; further checks wait
CHECKS_MAX = 2
#: the same with the first check of each caller
CHECKS_OF_CALLERS_MAX = 3
#: all checks that run at once, long ones included; further checks wait
CHECKS_RUNNING_MAX = 8
#: the same with the first check of each caller
CHECKS_RUNNING_OF_CALLERS_MAX = 16
LONG_CHECK_S = 5.0


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


def _forker() -> Forker:
    return forker_of(_PROGRAM, _environment)


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
    if isinstance(outcome, CheckedModel) and _importers_alone_make(outcome, task):
        raise Failure(Code.INTERNAL, f"the model check reports {outcome.source_format}, which it was not given")
    return outcome


def _importers_alone_make(outcome: CheckedModel, task: CheckTask) -> bool:
    """Whether a check reports a format, such as code, that no upload is of and no importer has made of this one."""
    of = formats().get(outcome.source_format)
    made = "" if task.imported is None else task.imported.source_format
    return of is not None and not of.file and made != outcome.source_format


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


class CheckSlots:
    """Slots for the checks of one event loop.

    Args:
        long_check_s: a check that runs for longer frees its slot, up to CHECKS_RUNNING_MAX checks in all.
    """

    def __init__(self, long_check_s: float = LONG_CHECK_S) -> None:
        self._long_check_s = long_check_s
        self._slots = CallerSlots(CHECKS_MAX, CHECKS_OF_CALLERS_MAX)
        self._running = CallerSlots(CHECKS_RUNNING_MAX, CHECKS_RUNNING_OF_CALLERS_MAX)

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[None]:
        """Wait for a slot; run the check inside the `async with` block."""
        async with self._running.acquire(caller()):
            slot = AsyncExitStack()
            await slot.enter_async_context(self._slots.acquire(caller()))
            finished = asyncio.Event()
            release = asyncio.create_task(self._release(slot, finished), name="release of a check slot")
            try:
                yield
            finally:
                finished.set()
                await asyncio.shield(release)

    async def _release(self, slot: AsyncExitStack, finished: asyncio.Event) -> None:
        """Free the slot when the check has finished or has run for `long_check_s`, whichever comes first."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._long_check_s):
                await finished.wait()
        await slot.aclose()


_slots_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, CheckSlots] = WeakKeyDictionary()


def check_slot() -> AbstractAsyncContextManager[None]:
    """Return a context manager that waits for a check slot of this process and frees it at the end of the block."""
    return _slots_of_loop.setdefault(asyncio.get_running_loop(), CheckSlots()).acquire()
