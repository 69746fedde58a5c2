"""The JSON bodies of the Open Inference Protocol v2, for the OpenAPI document, and those of metadata.

Source: KServe, "Open Inference Protocol", REST; Triton, "Binary Tensor Data Extension".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from millstream.services.model.formats import platform_of
from millstream.services.model.manifest import Manifest
from millstream.services.model.signature import TensorSpec
from millstream.services.model.usage import TEXT, Usage, takes_texts, usage_of
from millstream.services.plugin.registry import plugins

Datatype = Literal[
    "BOOL",
    "UINT8",
    "UINT16",
    "UINT32",
    "UINT64",
    "INT8",
    "INT16",
    "INT32",
    "INT64",
    "FP16",
    "BF16",
    "FP32",
    "FP64",
    "BYTES",
]
Shape = list[Annotated[int, Field(ge=0)]]

# --- inference ---


class InferInput(TypedDict):
    """An input. Its content is in `data`, or after the JSON part, or in shared memory."""

    name: str
    shape: Shape
    datatype: Datatype
    parameters: NotRequired[
        Annotated[
            dict[str, Any],
            Field(
                description="`binary_data_size`: bytes after the JSON part; `shared_memory_region`, "
                "`shared_memory_byte_size`, `shared_memory_offset`: memory that the client registered."
            ),
        ]
    ]
    data: NotRequired[Annotated[list[Any], Field(description="The elements in row-major order, flat or nested.")]]


class InferRequestedOutput(TypedDict):
    """An output that the reply has to contain."""

    name: str
    parameters: NotRequired[
        Annotated[
            dict[str, Any],
            Field(
                description="`binary_data`: raw bytes after the JSON part; `classification`: the number of classes; "
                "`shared_memory_region`, `shared_memory_byte_size`, `shared_memory_offset`: where to write it."
            ),
        ]
    ]


class InferRequest(TypedDict):
    """The inputs of a request, and which outputs it asks for."""

    inputs: list[InferInput]
    id: NotRequired[Annotated[str, Field(description="The reply repeats it.")]]
    parameters: NotRequired[
        Annotated[
            dict[str, Any],
            Field(
                description="`timeout` in microseconds, `priority`, `binary_data_output`: all outputs as raw bytes. "
                "Other parameters may be any scalar."
            ),
        ]
    ]
    outputs: NotRequired[Annotated[list[InferRequestedOutput], Field(description="Left out: all outputs.")]]


class InferOutput(TypedDict):
    """An output. Without `data` its content is after the JSON part (`binary_data_size`), or in shared memory."""

    name: str
    datatype: Datatype
    shape: Shape
    parameters: NotRequired[dict[str, Any]]
    data: NotRequired[Annotated[list[Any], Field(description="The elements in row-major order, flat.")]]


class InferReply(TypedDict):
    """The outputs of one version."""

    model_name: str
    model_version: str
    id: NotRequired[Annotated[str, Field(description="That of the request.")]]
    parameters: NotRequired[dict[str, Any]]
    outputs: list[InferOutput]


# --- metadata and health ---


class ServerMetadata(TypedDict):
    """Name and version of the server, and the protocol extensions that it supports."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(TypedDict):
    """A named input or output. -1 in `shape` is a variable dimension."""

    name: str
    datatype: Datatype
    shape: list[Annotated[int, Field(ge=-1)]]


class UsageParameters(TypedDict):
    """Of a version that takes more than tensors.

    `text_input`, of versions with a tokenizer: a BYTES input, (texts), that may replace all inputs.
    """

    text_input: NotRequired[str]
    usage: Usage


class ModelMetadata(TypedDict):
    """The signature of a version, and the versions of its model that are ready."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: NotRequired[UsageParameters]


class ModelNames(TypedDict):
    """Names of the models that answer requests."""

    models: list[str]


class ServerLive(TypedDict):
    """The process answers."""

    live: bool


class ServerReady(TypedDict):
    """Whether the server answers inference requests, and why not."""

    ready: bool
    error: NotRequired[str]


class ModelReady(TypedDict):
    """Whether a version answers requests, and why not. `load_s`: a request waits for its load about so many seconds."""

    name: str
    ready: bool
    error: NotRequired[str]
    load_s: NotRequired[float]


SCHEMAS = (InferRequest, InferReply, ServerMetadata, ModelMetadata, ModelNames, ServerLive, ServerReady, ModelReady)
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
