"""From a model's folder and a configuration to the manifests that are to serve.

ModelFolder ─> same files, same configuration as now? ─yes─> the manifest that serves now
                                                      ─no──> check (in the sandbox) ─> to_model_config ─> a new Manifest
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from pathlib import Path
from typing import NamedTuple

from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.check_process import check_in_place
from millstream.services.ingest.report import CheckedModel
from millstream.services.model.manifest import ROWS_MAX_DEFAULT, Batching, Manifest, ModelConfig, SourceFile
from millstream.services.model.version_files import check_labels, describe_file
from millstream.services.settings import Settings
from millstream.services.triton_config.config import ParsedConfig
from millstream.services.triton_config.model_folder import referenced_files
from millstream.services.triton_config.to_model_config import TranslatedConfig, to_model_config
from millstream.services.triton_config.to_signature import client_signature, requested_batching


class Candidate(NamedTuple):
    """A version to serve. `served`: its model file below `folder`. `origin`: None for an uploaded version's own folder.

    `now`: the manifest that serves it now. `digest`: of the upload; None: of the files as they are.
    """

    model: str
    version: int
    folder: Path
    served: str
    origin: str | None
    now: Manifest | None
    digest: str | None = None


async def manifest_of(candidate: Candidate, given: ParsedConfig, pool: str, settings: Settings) -> Manifest:
    """The manifest for a version: the one that serves now if nothing has changed. Raises Failure.

    `pool`: which one serves it if the configuration names no kind of device.
    """
    now = candidate.now
    if now is not None and await asyncio.to_thread(_unchanged, candidate, now, given, pool):
        return now
    rows_max = given.message.max_batch_size or ROWS_MAX_DEFAULT
    checked = await check_in_place(candidate.folder, candidate.served, requested_batching(given), settings, rows_max)
    signature = client_signature(given, checked.signature, checked.notes)
    how = to_model_config(given, signature, pool)
    batching = checked.batching if signature.batching else _off(checked)
    checked = checked.model_copy(update={"signature": signature, "batching": batching})
    return await asyncio.to_thread(_manifest, candidate, given, checked, how)


def _off(checked: CheckedModel) -> Batching:
    """Why each request runs alone: the check says it, or else the configuration."""
    if checked.batching.decided == "off":
        return checked.batching
    return Batching(decided="off", reason="the configuration says so")


def _unchanged(candidate: Candidate, now: Manifest, given: ParsedConfig, pool: str) -> bool:
    if (now.origin, now.served, now.triton) != (candidate.origin, candidate.served, given.document()):
        return False
    try:
        if to_model_config(given, now.signature, pool).config != now.config:
            return False
        return all(describe_file(candidate.folder, file.path) == file for file in now.files)
    except (Failure, OSError):  # the check says what is wrong
        return False


def _manifest(candidate: Candidate, given: ParsedConfig, checked: CheckedModel, how: TranslatedConfig) -> Manifest:
    files = _files(candidate, checked, how.config)
    check_labels(how.config, checked.signature, candidate.folder)
    return Manifest(
        model=candidate.model,
        version=candidate.version,
        created=time.time(),  # noqa: TID251 - for people
        digest=candidate.digest or _digest(files),
        served=checked.served,
        files=files,
        signature=checked.signature,
        config=how.config,
        opset=checked.opset,
        ir_version=checked.ir_version,
        producer=checked.producer,
        batching=checked.batching,
        notes=(*checked.notes, *how.notes),
        origin=candidate.origin,
        triton=given.document(),
    )


def _files(candidate: Candidate, checked: CheckedModel, config: ModelConfig) -> tuple[SourceFile, ...]:
    paths = [*checked.files, *(path for path in referenced_files(config) if path not in checked.files)]
    found = []
    for path in paths:
        if not (candidate.folder / path).is_file():
            raise invalid(f"there is no file {path} in the model's folder, which the configuration names")
        try:
            found.append(describe_file(candidate.folder, path))
        except OSError as error:
            raise Failure(Code.INVALID, f"{path} cannot be read: {error.strerror or error}") from error
    return tuple(found)


def _digest(files: tuple[SourceFile, ...]) -> str:
    """One for all files; that of an only file is its own."""
    if len(files) == 1:
        return files[0].sha256
    lines = "".join(f"{file.sha256}  {file.path}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()
