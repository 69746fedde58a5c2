"""What other plug-ins may use: models of Triton's Python backend, whose configurations the plug-in triton reads.

file, configuration ─> what they need (packages) ─> a process that imports the file, confined ─> auto_complete_config
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.plugins.functions.document import TRITON_FORMAT
from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.report import FILES_MAX, one_line

if TYPE_CHECKING:
    from millstream.plugins.functions.trial import CheckDeadline
    from millstream.services.settings import Settings

__all__ = ["TRITON_FORMAT", "CompletedModel", "completed", "files_of"]

_NEEDED = ("numpy",)  # what is imported as `triton_python_backend_utils` stands on it
_CACHE = "__pycache__"


class CompletedModel(NamedTuple):
    """A model of Triton's Python backend, whose file could be imported.

    Args:
        config: its configuration, completed by itself.
        options: of its load, as in a manifest.
        files: that workers read, below its folder.
        producer: as in a manifest.
    """

    config: dict[str, Any]
    options: dict[str, str]
    files: tuple[str, ...]
    producer: str


async def completed(folder: Path, served: str, config: Mapping[str, Any], settings: Settings) -> CompletedModel:
    """Have the model at `served`, below its `folder`, complete its configuration, in JSON form with its name.

    Raises Failure: INVALID with what the owner can do, UNAVAILABLE if no process can be started.
    """
    from millstream.plugins.functions.trial import CheckDeadline
    from millstream.services.sandbox.child import in_its_thread

    files = await asyncio.to_thread(files_of, folder, served)
    deadline = CheckDeadline(settings.check_s_max)
    work = partial(_completed, folder / served, config, settings, deadline)
    locked, found = await in_its_thread(work, deadline.end)
    options = {"configuration": json.dumps(found), "lock": locked}
    return CompletedModel(found, options, files, f"Python {platform.python_version()}")


def files_of(folder: Path, served: str) -> tuple[str, ...]:
    """Return the files of a version: those of its own folder, and those beside it that are of no other version."""
    found: list[str] = []
    version = Path(served).parts[0]
    for parent, folders, names in os.walk(folder):
        place = Path(parent).relative_to(folder)
        others = {one for one in folders if one.isdecimal() and one != version} if not place.parts else set()
        folders[:] = [one for one in folders if one not in {_CACHE, *others} and not one.startswith(".")]
        found += [str(place / name) for name in names if not name.startswith(".") and not name.endswith(".pyc")]
        if len(found) >= FILES_MAX:
            raise invalid(f"the model has more than {FILES_MAX} files")
    return tuple(sorted(found))


def _completed(
    path: Path, config: Mapping[str, Any], settings: Settings, deadline: CheckDeadline
) -> tuple[str, dict[str, Any]]:
    """Return the text of the lock, and the configuration."""
    from millstream.plugins.children.process import EndedError, InstanceProcesses, RunError
    from millstream.plugins.functions.document import RunsIn, triton_program_of
    from millstream.plugins.functions.function_packages import lock, python_of_text
    from millstream.plugins.functions.trial import started_timer

    with TemporaryDirectory(prefix="millstream-lock-") as made:
        name = lock(Path(made), path, settings.home, settings.import_s_max, needed=_NEEDED)
        locked = (Path(made) / name).read_text() if name else ""
    python = python_of_text(locked, path.parent, settings.home, settings.import_s_max)
    program = triton_program_of(
        path,
        json.dumps(config),
        str(config["name"]),
        RunsIn(python, settings.check_memory_bytes_max, 1, settings.unconfined_imports == "accept"),
        complete=True,
    )
    children = InstanceProcesses()
    try:
        child = deadline.child = children.start(program)
        timer = started_timer(child, deadline.seconds_max)
        try:
            return locked, dict(child.load()["config"])
        finally:
            timer.cancel()
            child.close()
    except OSError as error:
        raise Failure(Code.UNAVAILABLE, f"the check cannot be started: {error.strerror}", retry_after_s=5) from error
    except (RunError, EndedError) as error:
        raise invalid(one_line(str(error))) from error
    except (KeyError, TypeError, ValueError) as error:
        raise invalid(f"{path.name} completes its configuration in a way that cannot be read") from error
    finally:
        with suppress(OSError):
            children.close()
