"""A model's folder and a configuration -> the manifest of a version to serve.

files and configuration unchanged since the serving manifest? ─yes─> that manifest
                                                              ─no──> check (in the sandbox) ─> a new manifest
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from pathlib import Path
from typing import NamedTuple

from millstream.plugins.compat.triton.config.config import ParsedConfig, from_document
from millstream.plugins.compat.triton.config.model_folder import referenced_files
from millstream.plugins.compat.triton.config.to_model_config import TranslatedConfig, to_model_config
from millstream.plugins.compat.triton.config.to_signature import client_signature, declared_tensors, requested_batching
from millstream.plugins.compat.triton.config.unsupported_fields import PYTHON_BACKEND
from millstream.plugins.compat.triton.python_models import checked_python, has_files, is_python_model
from millstream.services.errors import Code, Failure, invalid
from millstream.services.ingest.check_process import check_in_place
from millstream.services.ingest.report import CheckedModel
from millstream.services.model.manifest import ROWS_MAX_DEFAULT, Batching, Manifest, ModelConfig, SourceFile
from millstream.services.model.version_files import check_labels, describe_file
from millstream.services.settings import Settings


class Candidate(NamedTuple):
    """A version to serve, and its files."""

    model: str
    version: int
    folder: Path
    served: str  # path of the model file below `folder`
    origin: str | None  # the folder from which it is served in place; None: an uploaded version
    now: Manifest | None  # the manifest that serves it now; None: it does not serve
    digest: str | None = None  # digest of the upload; None: it is computed from the files


async def manifest_of(candidate: Candidate, parsed: ParsedConfig, settings: Settings) -> Manifest:
    """Return the manifest of a version: the manifest that serves now if nothing has changed, else a new one.

    Args:
        candidate: The version.
        parsed: Its configuration.
        settings: Limits of the check.

    Raises:
        Failure: The version or its configuration cannot be served.
    """
    now = candidate.now
    if now is not None and await asyncio.to_thread(_unchanged, candidate, now, parsed):
        return now
    if is_python_model(candidate.served):
        checked, effective = await checked_python(candidate.folder, candidate.served, candidate.model, parsed, settings)
    else:
        checked, effective = await _checked(candidate, parsed, settings), parsed
    signature = client_signature(effective, checked.signature, checked.notes)
    translated = to_model_config(effective, signature)
    batching = checked.batching if signature.batching else _off(checked)
    checked = checked.model_copy(update={"signature": signature, "batching": batching})
    return await asyncio.to_thread(_manifest, candidate, parsed, checked, translated)


async def _checked(candidate: Candidate, parsed: ParsedConfig, settings: Settings) -> CheckedModel:
    if parsed.message.backend == PYTHON_BACKEND:
        raise invalid("backend 'python' serves a file model.py, and this version has none")
    rows_max = parsed.message.max_batch_size or ROWS_MAX_DEFAULT
    batching_wanted, foreign = requested_batching(parsed), candidate.origin is not None
    return await check_in_place(
        candidate.folder,
        candidate.served,
        batching_wanted,
        settings,
        rows_max,
        foreign=foreign,
        declared=declared_tensors(parsed),
    )


def _off(checked: CheckedModel) -> Batching:
    """Return why the version does not batch: the check's reason if it has one, else the configuration."""
    if checked.batching.decided == "off":
        return checked.batching
    return Batching(decided="off", reason="the configuration says so")


def _unchanged(candidate: Candidate, now: Manifest, parsed: ParsedConfig) -> bool:
    if (now.origin, now.served, now.triton) != (candidate.origin, candidate.served, parsed.document()):
        return False
    try:
        effective = parsed
        if now.options:  # it completed its configuration itself
            effective = from_document(json.loads(now.options["configuration"]))
            if not has_files(candidate.folder, candidate.served, {file.path for file in now.files}):
                return False
        if to_model_config(effective, now.signature).config != now.config:
            return False
        return all(describe_file(candidate.folder, file.path) == file for file in now.files)
    except (Failure, OSError):  # the check reports what is wrong
        return False


def _manifest(
    candidate: Candidate, parsed: ParsedConfig, checked: CheckedModel, translated: TranslatedConfig
) -> Manifest:
    files = _files(candidate, checked, translated.config)
    check_labels(translated.config, checked.signature, candidate.folder)
    return Manifest(
        model=candidate.model,
        version=candidate.version,
        created=time.time(),  # noqa: TID251 - shown to people
        digest=candidate.digest or _digest(files),
        source_format=checked.source_format,
        served=checked.served,
        files=files,
        signature=checked.signature,
        config=translated.config,
        opset=checked.opset,
        ir_version=checked.ir_version,
        producer=checked.producer,
        batching=checked.batching,
        notes=(*checked.notes, *translated.notes),
        trial=checked.trial,
        index_ranges={spec.name: r for spec in checked.signature.inputs if (r := checked.index_ranges.get(spec.name))},
        origin=candidate.origin,
        triton=parsed.document(),
        options=checked.options,
    )


def _files(candidate: Candidate, checked: CheckedModel, config: ModelConfig) -> tuple[SourceFile, ...]:
    paths = [*checked.files, *(path for path in referenced_files(config) if path not in checked.files)]
    files = []
    for path in paths:
        if not (candidate.folder / path).is_file():
            raise invalid(f"there is no file {path} in the model's folder, which the configuration names")
        try:
            files.append(describe_file(candidate.folder, path))
        except OSError as error:
            raise Failure(Code.INVALID, f"{path} cannot be read: {error.strerror or error}") from error
    return tuple(files)


def _digest(files: tuple[SourceFile, ...]) -> str:
    """Return one digest for all files; for a single file, its own digest."""
    if len(files) == 1:
        return files[0].sha256
    lines = "".join(f"{file.sha256}  {file.path}\n" for file in files)
    return hashlib.sha256(lines.encode()).hexdigest()
