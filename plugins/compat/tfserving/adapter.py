"""adapter: registers the routes of TensorFlow Serving's REST API, which KServe's V1 protocol is a part of."""

from __future__ import annotations

from millstream.gateway.http.adapter import Adapter, Routes, Tag
from millstream.gateway.http.error_formats import PLAIN
from millstream.plugins.compat.tfserving import routes, schemas

_TAG = Tag("v1: TensorFlow Serving, KServe", "The REST API of TensorFlow Serving, and KServe's V1.")

ADAPTER = Adapter(
    routes=(Routes(routes.router, _TAG),),
    error_format=PLAIN,
    error_paths=("/v1/models",),  # the other paths below /v1 are OpenAI's
    schemas=schemas.SCHEMAS,
)
