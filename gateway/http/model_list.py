"""The list of models under /v1/models, which clients of KServe V1 and of OpenAI can both read. Pure.

Source: KServe, "V1 Protocol"; OpenAI, "Models".
"""

from __future__ import annotations

from typing import Any

from millstream.gateway.catalog.snapshot import Snapshot
from millstream.services.model.manifest import Manifest

OWNER = "millstream"


def model_list(snapshot: Snapshot) -> dict[str, Any]:
    """Return the models that answer requests: `models` for KServe, `object` and `data` for OpenAI."""
    serving = sorted(
        (name, view.versions[view.serving])
        for name, view in snapshot.models.items()
        if view.serving is not None and view.serving in view.versions
    )
    return {
        "models": [name for name, _ in serving],
        "object": "list",
        "data": [model_card(view.manifest) for _, view in serving],
    }


def model_card(manifest: Manifest) -> dict[str, Any]:
    """Return a model as OpenAI describes it."""
    return {"id": manifest.model, "object": "model", "created": int(manifest.created), "owned_by": OWNER}
