"""The messages to and from the process that converts a model, as JSON. Pure.

ingest ── ImportTask (stdin) ──> import process ── ImportReport (stdout) ──> ingest
A model may take over the process, so a report is untrusted: every field is bounded, and paths stay below the folder.
"""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from millstream.plugins.convert.base import ImportOptions
from millstream.services.ingest.report import Converted, PathBelow, Rejection, Text


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
