"""JSON bodies of TensorFlow Serving's REST API and of KServe V1, for the OpenAPI document.

Source: TensorFlow Serving, "RESTful API"; KServe, "V1 Protocol"; CloudEvents 1.0.2, JSON event format.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from millstream.gateway.http.shared_documents import ModelList, PredictReply, PredictRequest


class ExamplesRequest(TypedDict):
    """Examples to classify or to regress."""

    examples: Annotated[list[dict[str, Any]], Field(description="Objects {feature: value or list}.", min_length=1)]
    context: NotRequired[Annotated[dict[str, Any], Field(description="Features that all examples share.")]]
    signature_name: NotRequired[Annotated[str, Field(description="serving_default, or empty.")]]


class ClassifyReply(TypedDict):
    """For each example its classes in the model's order: pairs of a label and a score."""

    result: list[list[list[Any]]]


class RegressReply(TypedDict):
    """A value for each example."""

    result: list[Any]


class LoadStatus(TypedDict):
    """Whether the version failed, and why."""

    error_code: Literal["OK", "UNKNOWN"]
    error_message: str


class VersionStatus(TypedDict):
    """The state of a version."""

    version: str
    state: Literal["START", "LOADING", "AVAILABLE", "UNLOADING", "END"]
    status: LoadStatus


class ModelStatus(TypedDict):
    """The state of a model: `ready` for KServe, `model_version_status` for TensorFlow Serving, the rest for OpenAI."""

    name: str
    ready: bool
    model_version_status: list[VersionStatus]
    id: str
    object: Literal["model"]
    created: int
    owned_by: str


class ModelSpec(TypedDict):
    """The version that the metadata describes."""

    name: str
    signature_name: str
    version: str


class SignatureMetadata(TypedDict):
    """The signature of a version as JSON of TensorFlow's SignatureDef message."""

    model_spec: ModelSpec
    metadata: dict[str, Any]


class CloudEvent(TypedDict):
    """A CloudEvent in structured mode: the request is `data`, or `data_base64`."""

    specversion: str
    id: str
    source: str
    type: str
    data: NotRequired[Any]
    data_base64: NotRequired[str]


SCHEMAS = (
    PredictRequest,
    PredictReply,
    ModelList,
    ExamplesRequest,
    ClassifyReply,
    RegressReply,
    ModelStatus,
    SignatureMetadata,
    CloudEvent,
)
