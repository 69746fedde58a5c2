"""Documents that several protocols share: JSON bodies in row or column form, and the list of models under /v1/models.

Source: TensorFlow Serving, "RESTful API"; KServe, "V1 Protocol"; OpenAI, "Models".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from millstream.gateway.catalog.snapshot import Snapshot
from millstream.services.model.manifest import Manifest


class PredictRequest(TypedDict):
    """Rows or columns. Give either `instances` (row form) or `inputs` (column form)."""

    instances: NotRequired[
        Annotated[
            list[Any],
            Field(description="A value for each row: nested lists, or an object {input: value}.", min_length=1),
        ]
    ]
    inputs: NotRequired[Annotated[Any, Field(description="The whole input, or an object {input: tensor}.")]]
    signature_name: NotRequired[Annotated[str, Field(description="serving_default, or empty.")]]


class PredictReply(TypedDict):
    """`predictions` in reply to the row form, `outputs` in reply to the column form."""

    predictions: NotRequired[
        Annotated[list[Any], Field(description="A value for each row; an object {output: value} for several outputs.")]
    ]
    outputs: NotRequired[Annotated[Any, Field(description="The only output, or an object {output: tensor}.")]]


class ModelCard(TypedDict):
    """A model as OpenAI describes it."""

    id: str
    object: Literal["model"]
    created: Annotated[int, Field(description="Seconds since the epoch.")]
    owned_by: str


class ModelList(TypedDict):
    """The models that answer requests: `models` for clients of KServe, the rest for clients of OpenAI."""

    models: list[str]
    object: Literal["list"]
    data: list[ModelCard]


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
    return {"id": manifest.model, "object": "model", "created": int(manifest.created), "owned_by": "millstream"}
