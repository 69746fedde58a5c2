"""Registers the routes of the Open Inference Protocol v2 over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

from millstream.gateway.http.adapter import Adapter, Place, Routes, Tag
from millstream.gateway.v2 import routes_infer, routes_models, schemas
from millstream.services.access.scopes import LIST, Need, Row
from millstream.services.metrics.catalogue import RequestProtocol

INFERENCE = Tag("v2 inference", "The Open Inference Protocol v2, with Triton's binary tensors.", Place.OPEN)

VERSIONED = ("", "/versions/{version}")


def _rows() -> Iterator[tuple[tuple[str, str], Row]]:
    for version in VERSIONED:
        path = f"/v2/models/{{model}}{version}"
        yield ("POST", f"{path}/infer"), Row(Need.INFER, "model")
        for rest in ("", "/ready"):
            yield ("GET", f"{path}{rest}"), Row(Need.DESCRIBE, "model")
    for path in ("/v2", "/v2/", "/v2/health/live", "/v2/health/ready"):
        yield ("GET", path), Row(Need.OPEN)
    yield ("GET", "/v2/models"), LIST


ADAPTER = Adapter(
    routes=(
        Routes(routes_infer.router, INFERENCE, order=0),
        Routes(routes_models.router, INFERENCE, order=40),
    ),
    access=dict(_rows()),
    protocols=(RequestProtocol.V2,),
    schemas=schemas.SCHEMAS,
)
