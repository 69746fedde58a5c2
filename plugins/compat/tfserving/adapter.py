"""adapter: registers the routes of TensorFlow Serving's REST API, which KServe's V1 protocol is a part of."""

from __future__ import annotations

from collections.abc import Iterator

from millstream.gateway.http.adapter import Adapter, Routes, Tag
from millstream.gateway.http.error_formats import PLAIN
from millstream.plugins.compat.tfserving import routes, schemas
from millstream.services.access.scopes import Need
from millstream.services.access.table import LIST, Row

_TAG = Tag("v1: TensorFlow Serving, KServe", "The REST API of TensorFlow Serving, and KServe's V1.")


def _rows() -> Iterator[tuple[tuple[str, str], Row]]:
    run, describe = Row(Need.INFER, "model"), Row(Need.DESCRIBE, "model")
    yield ("GET", "/v1/models"), LIST
    for version in ("", "/versions/{version}", "/labels/{label}"):
        path = f"/v1/models/{{model}}{version}"
        yield ("GET", path), describe
        yield ("GET", f"{path}/metadata"), describe
        for call in ("predict", "classify", "regress"):
            yield ("POST", f"{path}:{call}"), run
    yield ("POST", "/v1/models/{model}:explain"), run


ADAPTER = Adapter(
    routes=(Routes(routes.router, _TAG, order=100),),
    access=dict(_rows()),
    protocols=("tfserving",),
    error_format=PLAIN,
    error_paths=("/v1/models",),  # the other paths below /v1 are OpenAI's
    schemas=schemas.SCHEMAS,
)
