"""What Vertex AI says when it starts a container."""

from __future__ import annotations

from pydantic import BaseModel, Field

from millstream.services.plugin.plugin import Serving
from millstream.services.settings import settings_of

_ROUTE = r"^/[A-Za-z0-9._~:@/-]*$"


class VertexSettings(BaseModel):
    """Variables that Vertex AI sets in its containers."""

    vertex_health_route: str | None = Field(
        None,
        pattern=_ROUTE,
        validation_alias="AIP_HEALTH_ROUTE",
        description="Path of Vertex AI's health checks.",
    )
    vertex_predict_route: str | None = Field(
        None,
        pattern=_ROUTE,
        validation_alias="AIP_PREDICT_ROUTE",
        description="Path of Vertex AI's predictions, of the model that also answers /invocations.",
    )
    vertex_http_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        validation_alias="AIP_HTTP_PORT",
        description="HTTP port of `millstream serve` on Vertex AI.",
    )
    vertex_storage_uri: str | None = Field(
        None,
        validation_alias="AIP_STORAGE_URI",
        description="Folder of the models that `millstream serve` serves on Vertex AI: a path, or a file:// URI.",
    )


def serving(settings: object) -> Serving:
    """Return what Vertex AI wants of its container."""
    own = settings_of(settings, VertexSettings)
    return Serving(port=own.vertex_http_port, uri=own.vertex_storage_uri or "")
