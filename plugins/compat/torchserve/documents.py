"""Documents of TorchServe's management API, made from the catalog's snapshot. Pure.

Source: pytorch/serve, "Management API"; DescribeModelResponse and ListModelsResponse of its http package.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from millstream.gateway.catalog.snapshot import ModelView, Replica, Snapshot, VersionView, version_number
from millstream.gateway.tensors.json_document import excerpt
from millstream.services.errors import Failure, Subject, invalid, not_found
from millstream.services.wire.records import State

LIMIT_MAX = 1000

_STATUS = {State.READY: "READY", State.DRAINING: "UNLOADING", State.FAILED: "FAILED"}


def page(snapshot: Snapshot, limit: int, token: str | None) -> dict[str, Any]:
    """Return a page of `limit` models, from number `token` on in the order of names. Raises Failure(INVALID)."""
    start = 0
    if token:
        if not (token.isascii() and token.isdigit()) or len(token) > 9:
            raise invalid("'next_page_token' is a number: the one that the last page gave")
        start = int(token)
    names = sorted(snapshot.models)
    found: dict[str, Any] = {}
    if start + limit < len(names):
        found["nextPageToken"] = str(start + limit)
    found["models"] = [
        {"modelName": name, "modelUrl": model_url(snapshot.models[name])} for name in names[start : start + limit]
    ]
    return found


def model_url(model: ModelView) -> str:
    """Return the URL of the serving version; the model's name if it has no serving version."""
    view = model.versions.get(model.serving) if model.serving is not None else None
    return model.name if view is None else _url(view)


def _url(view: VersionView) -> str:
    """Return the URL that the version was registered with; of an upload, its path in the repository."""
    return view.manifest.url or f"{view.manifest.model}/{view.manifest.version}/{view.manifest.served}"


def find(snapshot: Snapshot, name: str, version: str | None) -> tuple[ModelView, VersionView]:
    """Return the model and version of a path; `1.0` is 1. Raises Failure(NOT_FOUND) in TorchServe's words."""
    model = snapshot.models.get(name)
    if model is None:
        raise unknown_model(snapshot, name)
    try:
        return model, model.version(None if version is None else version_number(name, plain(version)))
    except Failure:
        raise unknown_version(name, version, model.loaded_versions) from None


def unknown_model(snapshot: Snapshot, name: str) -> Failure:
    return not_found(f"Model not found: {excerpt(name)}{snapshot.did_you_mean(name)}", Subject.MODEL)


def plain(version: str) -> str:
    """Return the version number without TorchServe's decimal: `2.0` is 2."""
    return version.removesuffix(".0")


def unknown_version(name: str, version: str | None, known: str = "") -> Failure:
    """Return the failure for a version that does not serve. `known`: those that do, for the end of the message."""
    if version is None:
        return not_found(f"Model not found: {excerpt(name)} has no serving version{known}", Subject.VERSION)
    return not_found(
        f"Model version: {excerpt(version)} does not exist for model: {excerpt(name)}{known}", Subject.VERSION
    )


def description(view: VersionView, *, default: bool, waiting: int, waiting_max: int) -> dict[str, Any]:
    """Return the description of one version.

    Args:
        view: the version.
        default: whether it serves requests that name no version.
        waiting: requests in this gateway's lane.
        waiting_max: rows that may wait there.
    """
    manifest = view.manifest
    workers = len(view.replicas)
    return {
        "modelName": manifest.model,
        "modelVersion": str(manifest.version),
        "modelUrl": _url(view),
        "engine": "onnxruntime",
        "runtime": "python",
        "minWorkers": workers,
        "maxWorkers": workers,
        "batchSize": manifest.config.rows_max,
        "maxBatchDelay": int(manifest.config.queue_delay_ms_max),
        "responseTimeout": int(manifest.config.timeout_ms_default / 1000),
        "loadedAtStartup": False,
        "default": default,
        "workers": [_worker(replica) for replica in view.replicas],
        "jobQueueStatus": {"remainingCapacity": max(0, waiting_max - waiting), "pendingRequests": waiting},
    }


def _worker(replica: Replica) -> dict[str, Any]:
    started = datetime.fromtimestamp(replica.worker.started, UTC).isoformat(timespec="milliseconds")
    gpu = replica.worker.device != "cpu"
    return {
        "id": replica.worker.id,
        "startTime": started.replace("+00:00", "Z"),
        "status": _STATUS.get(replica.instance.state, "LOADING"),
        "memoryUsage": replica.instance.resident_bytes,
        "pid": replica.worker.pid,
        "gpu": gpu,
        "gpuUsage": "N/A",
    }
