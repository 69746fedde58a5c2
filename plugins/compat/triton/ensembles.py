"""Ensembles in model repositories: which models they run, and the manifest of one.

A plug-in adds the format whose platform is "ensemble" (plugins/graphs); without it, ensembles are refused.

configuration ─> models of its steps, which are loaded first ─> Composer.compose ─> Manifest
"""

from __future__ import annotations

import hashlib
import json
import time
from typing import Any

from millstream.gateway.catalog.parts import is_current
from millstream.gateway.catalog.snapshot import Snapshot
from millstream.gateway.scheduling.composed import Composer, composer_of
from millstream.plugins.compat.triton.candidates import Candidate
from millstream.plugins.compat.triton.config.config import ParsedConfig
from millstream.plugins.compat.triton.config.to_model_config import to_model_config
from millstream.services.ingest.report import CheckedModel
from millstream.services.model.formats import ENSEMBLE, format_of_platform
from millstream.services.model.manifest import Batching, Manifest, ModelConfig
from millstream.services.model.signature import Signature
from millstream.services.plugin.plugin import Format

_NOTHING = Signature(inputs=(), outputs=(), batching=False)


def is_ensemble(parsed: ParsedConfig | None) -> bool:
    """Return whether a configuration is of an ensemble."""
    if parsed is None:
        return False
    message = parsed.message
    return bool(message.platform == ENSEMBLE or message.WhichOneof("scheduling_choice") == "ensemble_scheduling")


def models_of_steps(parsed: ParsedConfig | None) -> list[str]:
    """Return the names of the models that an ensemble runs; none if it is no ensemble."""
    if parsed is None or not is_ensemble(parsed):
        return []
    return list(dict.fromkeys(step.model_name for step in parsed.message.ensemble_scheduling.step if step.model_name))


def check_ensemble(parsed: ParsedConfig, model: str) -> None:
    """Raise Failure(INVALID) for an ensemble that is wrong whatever its models are."""
    _composer()[1].check(_document(parsed, model))


def _composer() -> tuple[Format, Composer]:
    found = format_of_platform(ENSEMBLE)
    composer = None if found is None else composer_of(found.name)
    assert found is not None and composer is not None, "the configuration is refused without"  # noqa: PT018
    return found, composer


def _document(parsed: ParsedConfig, model: str) -> dict[str, Any]:
    return {**parsed.document(), "name": model}


def ensemble_manifest(candidate: Candidate, parsed: ParsedConfig, snapshot: Snapshot) -> Manifest:
    """Return the manifest of an ensemble: that which serves now if nothing has changed. Raises Failure(INVALID)."""
    found, composer = _composer()
    document = _document(parsed, candidate.model)
    now = candidate.now
    known = now is not None and (now.origin, now.triton) == (candidate.origin, document)
    if now is not None and known and now.parts and is_current(snapshot.models, now):
        return now
    checked = CheckedModel(
        served=candidate.served,
        files=(),
        sources=(),
        signature=_NOTHING,
        opset=0,
        ir_version=0,
        producer="",
        batching=Batching(),
        notes=(),
        source_format=found.name,
    )
    checked = composer.compose(document, checked, ModelConfig(), candidate.model, snapshot)
    translated = to_model_config(parsed, checked.signature)
    return Manifest(
        model=candidate.model,
        version=candidate.version,
        created=time.time(),  # noqa: TID251 - shown to people
        digest=hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest(),
        source_format=found.name,
        served=candidate.served,
        files=(),
        signature=checked.signature,
        config=translated.config.model_copy(update={"pools": (), "labels": {}}),
        opset=0,
        ir_version=0,
        batching=checked.batching,
        notes=translated.notes,
        origin=candidate.origin,
        triton=document,
        parts=checked.parts,
    )
