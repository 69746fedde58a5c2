"""adapter: registers the routes of SageMaker: the calls of its containers, and its runtime API."""

from __future__ import annotations

from millstream.gateway.http.adapter import Adapter, Routes, Tag
from millstream.plugins.compat.sagemaker import errors, routes, routes_ping, schemas
from millstream.services.access.scopes import Need
from millstream.services.access.table import Row

_TAG = Tag("SageMaker", "The calls of SageMaker's containers, and its runtime API for boto3.")

_RUN = Row(Need.INFER)  # the model is in a header, or is the default one

ADAPTER = Adapter(
    routes=(Routes(routes_ping.router, _TAG, order=110), Routes(routes.router, _TAG, order=110)),
    access={
        ("GET", "/ping"): Row(Need.OPEN),
        ("GET", "/version"): Row(Need.OPEN),
        ("POST", "/invocations"): _RUN,
        ("POST", "/endpoints/{endpoint}/invocations"): _RUN,
        ("POST", "/endpoints/{endpoint}/invocations-response-stream"): _RUN,
        ("POST", "/endpoints/{endpoint}/async-invocations"): _RUN,
        ("POST", "/models/{model}/invoke"): Row(Need.INFER, "model"),
    },
    protocols=("sagemaker",),
    error_format=errors.FORMAT,
    error_paths=("/endpoints/",),  # a container's own errors have the plain format
    schemas=schemas.SCHEMAS,
)
