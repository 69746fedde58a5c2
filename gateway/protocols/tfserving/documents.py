"""What TensorFlow Serving, KServe V1 and OpenAI say of a model, as one object that the clients of all three can read. Pure.

Source: TensorFlow Serving, "RESTful API" (status, metadata) and types.proto; KServe, "V1 Protocol"; OpenAI, "Models".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.gateway.catalog.snapshot import ModelView, Snapshot, VersionView
from millstream.gateway.protocols.tfserving.predict import SIGNATURE_NAME
from millstream.services.model.manifest import Manifest
from millstream.services.model.signature import TensorSpec
from millstream.services.wire.records import State

OWNER = "millstream"

_STATE = {
    State.RECEIVING: "START",
    State.PENDING: "START",
    State.CHECKING: "START",
    State.LOADING: "LOADING",
    State.WARMING: "LOADING",
    State.READY: "AVAILABLE",
    State.DRAINING: "UNLOADING",
    State.FAILED: "END",
}
_DTYPE = {
    "BOOL": "DT_BOOL",
    "UINT8": "DT_UINT8",
    "UINT16": "DT_UINT16",
    "UINT32": "DT_UINT32",
    "UINT64": "DT_UINT64",
    "INT8": "DT_INT8",
    "INT16": "DT_INT16",
    "INT32": "DT_INT32",
    "INT64": "DT_INT64",
    "FP16": "DT_HALF",
    "BF16": "DT_BFLOAT16",
    "FP32": "DT_FLOAT",
    "FP64": "DT_DOUBLE",
    "BYTES": "DT_STRING",
}


def model_list(snapshot: Snapshot) -> dict[str, Any]:
    """Models that answer requests: `models` for KServe, `object` and `data` for OpenAI."""
    serving = sorted(
        (name, view.versions[view.serving])
        for name, view in snapshot.models.items()
        if view.serving is not None and view.serving in view.versions
    )
    return {
        "models": [name for name, _ in serving],
        "object": "list",
        "data": [_card(view.manifest) for _, view in serving],
    }


def model_status(model: ModelView, asked: VersionView, *, ready: bool, all_versions: bool) -> dict[str, Any]:
    """One model: `name` and `ready` for KServe, `model_version_status` for TensorFlow, the rest for OpenAI."""
    views = [view for _, view in sorted(model.versions.items(), reverse=True)] if all_versions else [asked]
    return {
        "name": model.name,
        "ready": ready,
        "model_version_status": [_version_status(view) for view in views],
        **_card(asked.manifest),
    }


def _card(manifest: Manifest) -> dict[str, Any]:
    return {"id": manifest.model, "object": "model", "created": int(manifest.created), "owned_by": OWNER}


def _version_status(view: VersionView) -> dict[str, Any]:
    failed = view.state is State.FAILED
    status = {"error_code": "UNKNOWN" if failed else "OK", "error_message": view.reason or "" if failed else ""}
    return {"version": str(view.manifest.version), "state": _STATE[view.state], "status": status}


def model_metadata(manifest: Manifest) -> dict[str, Any]:
    """The signature, as TensorFlow writes the protobuf message."""
    signature = manifest.signature
    described = {
        "inputs": _tensors(signature.inputs),
        "outputs": _tensors(signature.outputs),
        "method_name": "tensorflow/serving/predict",
    }
    return {
        "model_spec": {"name": manifest.model, "signature_name": "", "version": str(manifest.version)},
        "metadata": {"signature_def": {"signature_def": {SIGNATURE_NAME: described}}},
    }


def _tensors(specs: Sequence[TensorSpec]) -> dict[str, Any]:
    return {
        spec.name: {
            "dtype": _DTYPE[spec.datatype],
            "tensor_shape": {"dim": [{"size": str(dim), "name": ""} for dim in spec.shape], "unknown_rank": False},
            "name": spec.name,
        }
        for spec in specs
    }
