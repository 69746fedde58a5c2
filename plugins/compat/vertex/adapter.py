"""adapter: the two paths on which Vertex AI calls a container: health, and predictions of the default model.

Vertex AI names them when it starts the container (services/settings.py: AIP_HEALTH_ROUTE, AIP_PREDICT_ROUTE); outside
of Vertex AI there are none. A path that another protocol serves, such as /ping, stays that protocol's.
Source: Google Cloud, "Custom container requirements for prediction".
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from millstream.gateway.http.adapter import Adapter, Routes
from millstream.gateway.http.context import DepsOf
from millstream.plugins.compat.sagemaker.routes import invoke
from millstream.plugins.compat.sagemaker.routes_ping import ping
from millstream.plugins.compat.sagemaker.target import default_model
from millstream.services.settings import Settings


def vertex_adapter(settings: Settings) -> Adapter:
    """Return the adapter with the paths that the settings name."""
    router = APIRouter(include_in_schema=False)
    if settings.vertex_health_route is not None:
        router.add_api_route(settings.vertex_health_route, ping, methods=["GET"], name="vertex_health")
    if settings.vertex_predict_route is not None:
        router.add_api_route(settings.vertex_predict_route, _predict, methods=["POST"], name="vertex_predict")
    return Adapter(routes=(Routes(router),) if router.routes else ())


async def _predict(request: Request, deps: DepsOf) -> Response:
    """Answer `{"instances": …}` with `{"predictions": …}`; other bodies as /invocations does."""
    model = default_model(deps.catalog.snapshot, deps.settings.sagemaker_model)
    return await invoke(request, deps, model, caller=deps.callers.vertex)
