"""metadata: v2's metadata of the server, and of a model's inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.services.model.manifest import Manifest
from millstream.services.model.platforms import platform_of
from millstream.services.model.signature import TensorSpec
from millstream.services.model.usage import TEXT, takes_texts, usage_of

#: supported extensions of the protocol, under the reference's names
EXTENSIONS = (
    "classification",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)


def server_metadata(name: str, version: str) -> dict[str, Any]:
    """Return the reply to GET /v2. `version`: Millstream's version."""
    return {"name": name, "version": version, "extensions": list(EXTENSIONS)}


def model_metadata(manifest: Manifest, versions: Sequence[int]) -> dict[str, Any]:
    """Return the reply to GET /v2/models/{M}; -1 marks a variable dimension. `versions`: the ready versions."""
    return {
        "name": manifest.model,
        "versions": [str(version) for version in versions],
        "platform": platform_of(manifest)[0],
        "inputs": [_tensor(spec) for spec in manifest.signature.inputs],
        "outputs": [_tensor(spec) for spec in manifest.answered.outputs],
    }


def usage_parameters(manifest: Manifest) -> dict[str, Any]:
    """Return the member that only metadata over REST has, {} for versions that take tensors and nothing else.

    The text is not among `inputs`: clients that send every input of the metadata would send texts and token ids.
    """
    usage = usage_of(manifest)
    if usage.kind == "tensors":
        return {}
    text = {"text_input": TEXT} if takes_texts(manifest) else {}
    return {"parameters": {**text, "usage": usage.model_dump()}}


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
