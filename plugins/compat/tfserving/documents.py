"""Status and metadata of a model for clients of TensorFlow Serving, KServe V1 and, in the same object, OpenAI. Pure.

Source: TensorFlow Serving, "RESTful API" (status, metadata) and types.proto; KServe, "V1 Protocol"; OpenAI, "Models".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.gateway.catalog.snapshot import ModelView, VersionView
from millstream.gateway.http.shared_documents import model_card
from millstream.plugins.compat.tfserving.predict import SIGNATURE_NAME
from millstream.services.model.manifest import Manifest
from millstream.services.model.signature import TensorSpec
from millstream.services.wire.records import State

_STATE = {
    State.RECEIVING: "START",
    State.PENDING: "START",
    State.CHECKING: "START",
    State.STANDBY: "AVAILABLE",
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


def model_status(model: ModelView, version: VersionView, *, ready: bool, all_versions: bool) -> dict[str, Any]:
    """Return the state: `name` and `ready` for KServe, `model_version_status` for TensorFlow, the rest for OpenAI.

    Args:
        model: the model that the path names.
        version: the version that the path names, or the serving version.
        ready: whether that version answers requests.
        all_versions: whether to list all versions of the model.
    """
    views = [view for _, view in sorted(model.versions.items(), reverse=True)] if all_versions else [version]
    return {
        "name": model.name,
        "ready": ready,
        "model_version_status": [_version_status(view) for view in views],
        **model_card(version.manifest),
    }


def _version_status(view: VersionView) -> dict[str, Any]:
    failed = view.state is State.FAILED
    status = {"error_code": "UNKNOWN" if failed else "OK", "error_message": view.reason or "" if failed else ""}
    state = "AVAILABLE" if view.available else _STATE[view.state]
    return {"version": str(view.manifest.version), "state": state, "status": status}


def model_metadata(manifest: Manifest) -> dict[str, Any]:
    """Return the signature as JSON of TensorFlow's protobuf message."""
    signature = manifest.answered
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
