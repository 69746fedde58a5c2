"""The check of a model that stays where it is: the same process and limits as for an upload; nothing is written."""

from __future__ import annotations

from pathlib import Path

from millstream.services.ingest.check_process import check
from millstream.services.ingest.check_slots import turn
from millstream.services.ingest.report import Checked, CheckTask
from millstream.services.model.manifest import ROWS_MAX_DEFAULT
from millstream.services.settings import Settings


async def examine(
    folder: Path, served: str, batching: bool | None, settings: Settings, rows_max: int = ROWS_MAX_DEFAULT
) -> Checked:
    """How the model at `served` below `folder` is served. Raises Failure as an upload's check does."""
    task = CheckTask(
        folder=folder,
        batching=batching,
        rows_max=rows_max,
        unpacked_bytes_max=settings.upload_bytes_max,
        memory_bytes_max=settings.check_memory_bytes_max,
        cpu_s_max=int(settings.check_s_max) + 1,
        served=served,
    )
    async with turn():
        return await check(task, settings.check_s_max)
