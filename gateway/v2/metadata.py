"""V2's metadata of the server, and of a model's inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millstream.services.model.formats import platform_of
from millstream.services.model.manifest import Manifest
from millstream.services.model.signature import TensorSpec
from millstream.services.model.usage import TEXT, takes_texts, usage_of
from millstream.services.plugin.registry import plugins

#: the core's extensions of the protocol, under the reference's names; plug-ins add further ones
EXTENSIONS = ("classification", "schedule_policy", "binary_tensor_data", "parameters")


def extensions() -> tuple[str, ...]:
    """Return the extensions of the protocol that this server has, under the reference's names."""
    return (*EXTENSIONS, *(name for plugin in plugins() for name in plugin.v2_extensions))


#: Triton's clients expect it
SERVER_NAME = "triton"


def server_metadata(version: str, extensions: Sequence[str]) -> dict[str, Any]:
    """Return the reply to GET /v2. `version`: Millstream's version."""
    return {"name": SERVER_NAME, "version": version, "extensions": list(extensions)}


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
