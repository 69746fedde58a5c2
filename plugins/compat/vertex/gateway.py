"""The two paths on which Vertex AI calls a container: health, and predictions of the default model.

Vertex AI names them when it starts the container (AIP_HEALTH_ROUTE, AIP_PREDICT_ROUTE); outside
of Vertex AI there are none. A path that another protocol serves, such as /ping, stays that protocol's.
Source: Google Cloud, "Custom container requirements for prediction".
"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.types import ASGIApp

from millstream.gateway.http.adapter import Adapter, Routes
from millstream.gateway.http.deps import Deps, DepsOf
from millstream.gateway.http.errors import ErrorReplies
from millstream.plugins.compat.sagemaker.gateway import invoke, ping
from millstream.plugins.compat.sagemaker.settings import SageMakerSettings
from millstream.plugins.compat.sagemaker.target import default_model
from millstream.plugins.compat.vertex.settings import VertexSettings
from millstream.plugins.compat.vertex.triton_calls import TritonCalls
from millstream.services.access.scopes import Need, Row
from millstream.services.settings import Settings, settings_of


def _of_settings(settings: Settings) -> Adapter:
    """Return the adapter with the paths that the settings name."""
    own = settings_of(settings, VertexSettings)
    health, predict = own.vertex_health_route, own.vertex_predict_route
    router = APIRouter(include_in_schema=False)
    access = {}
    if health is not None:
        router.add_api_route(health, ping, methods=["GET"], name="vertex_health")
        access["GET", health] = Row(Need.OPEN)
    if predict is not None:
        router.add_api_route(predict, _predict, methods=["POST"], name="vertex_predict")
        access["POST", predict] = Row(Need.INFER)
    return Adapter(
        routes=(Routes(router, order=900),),  # last: these paths may be those of another protocol
        access=access,
        protocols=ADAPTER.protocols,
        middleware=(_triton_calls,),
    )


def _triton_calls(app: ASGIApp, deps: Deps, replies: ErrorReplies) -> ASGIApp:
    route = settings_of(deps.settings, VertexSettings).vertex_predict_route
    return app if route is None else TritonCalls(app, route, replies)


async def _predict(request: Request, deps: DepsOf) -> Response:
    """Answer `{"instances": …}` with `{"predictions": …}`; other bodies as /invocations does."""
    model = default_model(deps.catalog.snapshot, settings_of(deps.settings, SageMakerSettings).sagemaker_model)
    return await invoke(request, deps, model, caller=deps.caller("vertex"))


ADAPTER = Adapter(protocols=("vertex",), of_settings=_of_settings)
