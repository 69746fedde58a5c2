"""Runs the import process, and always ends it.

Recognised ─> ImportTask ─> import process (own session, sandbox, bounded memory and time) ─> Converted, or a Failure
The process is forked from one that has the framework loaded (`ingest.fork_server`), for those that take long to load.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import shutil
import signal
from pathlib import Path
from weakref import WeakKeyDictionary

from pydantic import ValidationError

from millstream.plugins.convert.base import SCRATCH, Importer
from millstream.plugins.convert.import_process import ImportReport, ImportTask
from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.check_process import FORKS
from millstream.services.ingest.forked_check import ForkedProgram, forker_of
from millstream.services.ingest.importers import IMPORTED, SOURCE, ImportOptions
from millstream.services.ingest.report import Converted, Recognised, Rejection, printed
from millstream.services.process.audit import caller
from millstream.services.process.caller_slots import CallerSlots
from millstream.services.repository.disk import is_full, storage_failure
from millstream.services.sandbox.child import Ended, WatchOf, confined_environment, run_confined
from millstream.services.sandbox.group_watch import FolderWatch, GroupWatch
from millstream.services.settings import Settings

log = logging.getLogger("millstream.import")

_MODULE = "millstream.plugins.convert.import_process"
_RETRY_S = 5.0
#: imports that run at once, each of which may take gigabytes, and minutes
IMPORTS_MAX = 2
#: the same with the first import of each caller
IMPORTS_OF_CALLERS_MAX = 4
#: A process with a framework loaded, which takes up to 500 MB, ends after this time without an import.
WARM_S = 300.0
#: for an import to begin: until then the framework is loaded, on a busy machine
BEGIN_S_MAX = 120.0
_slots_of_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, CallerSlots] = WeakKeyDictionary()


async def convert(
    importer: Importer, folder: Path, recognised: Recognised, options: ImportOptions, settings: Settings
) -> Converted:
    """Convert what `importer` recognised below `folder`, the staging folder of an upload.

    Raises:
        Failure: the importer's refusal; INVALID, if the process crashed, ended or exceeded its limits; UNSUPPORTED, if
            the framework is not installed; INTERNAL, if the process could not begin; UNAVAILABLE, if it cannot start.
    """
    task = ImportTask(
        folder=folder.resolve(),
        importer=recognised.importer,
        path=recognised.path,
        options=options,
        memory_bytes_max=settings.import_memory_bytes_max,
        cpu_s_max=2 * int(settings.import_s_max) + 1,  # threads of a framework may use several cores
        file_bytes_max=settings.upload_bytes_max,
        unconfined=settings.unconfined_imports == "accept",
    )
    written = FolderWatch(task.folder, settings.import_disk_bytes_max)

    def watch_of(leader: int) -> GroupWatch:
        return GroupWatch(leader, written, settings.import_memory_bytes_max, alone=True)

    slots = _slots_of_loop.setdefault(asyncio.get_running_loop(), CallerSlots(IMPORTS_MAX, IMPORTS_OF_CALLERS_MAX))
    try:
        async with slots.acquire(caller()), asyncio.timeout(settings.import_s_max):
            ended = await _run(task, importer.rehearsal, watch_of)
    except TimeoutError:
        raise _too_slow(recognised, settings) from None
    except OSError as error:
        message = f"the import cannot be started: {error.strerror}"
        raise Failure(Code.UNAVAILABLE, message, retry_after_s=_RETRY_S) from error
    if ended.errors:  # for the operator alone: an uploader could have it print what it found
        log.info("the import of a %s model printed: %s", recognised.importer, printed(ended.errors))
    await asyncio.to_thread(written.measure)  # what it wrote last
    if exceeded := ended.exceeded or written.exceeded:
        raise invalid(
            f"the import of the {recognised.importer} model was ended: {exceeded} "
            "(MILLSTREAM_UPLOAD_BYTES_MAX sets the limit on bytes of files)"
        )
    if ended.status == -signal.SIGXCPU:
        raise _too_slow(recognised, settings)
    if ended.status < 0 and is_full(task.folder):  # a page of a mapped file that finds no space is SIGBUS
        raise storage_failure(OSError(errno.ENOSPC, ""), task.folder)
    if ended.status < 0:
        raise invalid(
            f"the import of the {recognised.importer} model was ended by signal {-ended.status}: the model crashes its "
            f"framework or needs more than {settings.import_memory_bytes_max >> 20} MiB "
            "(twice MILLSTREAM_CHECK_MEMORY_BYTES_MAX)"
        )
    return _outcome(ended, task)


async def _run(task: ImportTask, rehearsal: str, watch_of: WatchOf) -> Ended:
    """Run the import in a process that is forked where its framework is loaded; else in one that is started."""
    document = task.model_dump_json().encode()
    program = ForkedProgram(_MODULE, rehearsal, WARM_S, BEGIN_S_MAX)
    if rehearsal and FORKS:
        if (ended := await forker_of(program, _environment).run(document, watch_of)) is not None:
            return ended
        for name in (IMPORTED, SCRATCH):  # of an import that was ended with its fork server
            await asyncio.to_thread(shutil.rmtree, task.folder / name, ignore_errors=True)
    return await run_confined(_MODULE, task.folder, document, _environment(), watch_of)


def _outcome(ended: Ended, task: ImportTask) -> Converted:
    """Return what the process reports. What it names is checked: the model may have taken the process over."""
    try:
        outcome = ImportReport.model_validate_json(ended.report).outcome
    except ValidationError:
        if not (task.folder / IMPORTED).is_dir():  # the process makes it before it reads anything of the upload
            raise Failure(Code.INTERNAL, "the import could not begin; the log has what it printed") from None
        raise invalid(
            f"the {task.importer} model ended the process of its import (exit status {ended.status}), which left no "
            "result: it does more than a model"
        ) from None
    if isinstance(outcome, Rejection):
        raise Failure(outcome.code, outcome.message)
    named = [outcome.served, *outcome.files, *outcome.samples]
    missing = next((path for path in named if not _is_of_upload(task.folder, path)), None)
    if missing is not None:
        raise invalid(f"the import of the {task.importer} model names {missing[:80]!a}, which is no file of the upload")
    return outcome


def _is_of_upload(folder: Path, path: str) -> bool:
    found = folder / path
    return path.startswith((f"{IMPORTED}/", f"{SOURCE}/")) and found.is_file() and not found.is_symlink()


def _too_slow(recognised: Recognised, settings: Settings) -> Failure:
    return invalid(
        f"the import of the {recognised.importer} model took longer than {settings.import_s_max:g} s "
        "(five times MILLSTREAM_CHECK_S_MAX)"
    )


def _environment() -> dict[str, str]:
    """Return the environment of imports: frameworks look for no network, and compute with the processor."""
    return confined_environment(
        KERAS_BACKEND="torch",
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        HF_HUB_DISABLE_TELEMETRY="1",
        HF_HUB_DISABLE_PROGRESS_BARS="1",
        TRANSFORMERS_VERBOSITY="error",
        TOKENIZERS_PARALLELISM="false",
        JAX_PLATFORMS="cpu",
        TF_CPP_MIN_LOG_LEVEL="3",
        CUDA_VISIBLE_DEVICES="",
        JOBLIB_MULTIPROCESSING="0",
    )
