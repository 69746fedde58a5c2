"""lost instance (its server is gone) ─> drain ─> unload ─> FAILED with the reason ─> loaded again when it is back."""

from __future__ import annotations

import logging

from millstream.services.wire.records import State
from millstream.workers.models.loaded_models import LoadedModels
from millstream.workers.residency.unloads import Unloads
from millstream.workers.residency.version_loads import VersionLoads, about_version

log = logging.getLogger("millstream.reconciler")


def unload_lost(models: LoadedModels, unloads: Unloads, loads: VersionLoads) -> None:
    """Unload the instances that cannot run any longer, so that gateways send their requests elsewhere.

    Raises Failure(UNAVAILABLE) without Redis.
    """
    for model in models.all().values():
        reason = model.instance.lost if model.state is State.READY and model.instance is not None else ""
        if reason:
            manifest = model.manifest
            log.warning(
                "lost: %s version %s: %s", manifest.model, manifest.version, reason, extra=about_version(manifest)
            )
            unloads.remove(model)
            loads.lose(manifest, reason)
