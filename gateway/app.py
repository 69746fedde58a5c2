"""Builds the HTTP application: every route but the infer endpoint's fast path, which sits below it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.gateway.admin import routes_models as admin_models
from millstream.gateway.admin import routes_pools as admin_pools
from millstream.gateway.admin import routes_uploads as admin_uploads
from millstream.gateway.catalog.upload_slots import Uploads
from millstream.gateway.protocols.http import docs, metrics, ping
from millstream.gateway.protocols.http.deps import Deps
from millstream.gateway.protocols.http.errors import UnexpectedErrors, add_error_handlers
from millstream.gateway.protocols.http.reply_budget_middleware import ReplyBudgetMiddleware
from millstream.gateway.protocols.openai import routes as openai
from millstream.gateway.protocols.openai.embeddings import Embeddings
from millstream.gateway.protocols.openai.tokenizers import Tokenizers
from millstream.gateway.protocols.sagemaker import routes as sagemaker
from millstream.gateway.protocols.tfserving import routes as v1
from millstream.gateway.protocols.torchserve import routes as torchserve
from millstream.gateway.protocols.torchserve import routes_management as management_api
from millstream.gateway.protocols.v2 import routes_config as configurations
from millstream.gateway.protocols.v2 import routes_generate as generate
from millstream.gateway.protocols.v2 import routes_health as health
from millstream.gateway.protocols.v2 import routes_infer as infer
from millstream.gateway.protocols.v2 import routes_models as models
from millstream.gateway.protocols.v2 import routes_repository as repository
from millstream.gateway.protocols.v2 import routes_shared_memory as client_memory
from millstream.gateway.protocols.v2 import routes_statistics as statistics
from millstream.gateway.protocols.v2 import routes_trace as trace
from millstream.gateway.tensors.json_text import JsonLimits

_DESCRIPTION = "Model serving: upload a model, send it requests."
_TAGS = [
    {"name": "v2 inference", "description": "The Open Inference Protocol v2, with Triton's binary tensors."},
    {"name": "v2 extensions", "description": "What Triton adds to the protocol."},
    {"name": "v2 shared memory", "description": "Memory of clients on this machine, for tensors that need not travel."},
    {"name": "v1: TensorFlow Serving, KServe", "description": "The REST API of TensorFlow Serving, and KServe's V1."},
    {"name": "SageMaker", "description": "What a container of SageMaker answers, and its runtime API for boto3."},
    {"name": "OpenAI", "description": "Embeddings."},
    {"name": "TorchServe", "description": "Predictions, and the management of models from files of this machine."},
    {"name": "v2 model repository", "description": "Triton's extensions: model configuration and model repository."},
    {"name": "admin: models", "description": "Models and their versions."},
    {"name": "admin: pools", "description": "Worker pools and workers."},
    {"name": "operation", "description": "For those who run the server."},
]


#: in the order of the documentation page
_ROUTES = (
    infer,
    generate,
    health,
    statistics,  # before models: "stats" is no model there
    trace,
    models,
    client_memory,
    v1,
    ping,
    sagemaker,
    openai,
    torchserve,
    management_api,
    configurations,
    repository,
    admin_models,
    admin_uploads,
    admin_pools,
    metrics,
    docs,
)


def build_app(deps: Deps) -> FastAPI:
    """The application over `deps`; its lifespan awaits `deps.start` and `deps.stop`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await deps.start()
        try:
            yield
        finally:
            await deps.stop()

    app = _App(
        title="Millstream",
        version=deps.version,
        description=_DESCRIPTION,
        openapi_tags=_TAGS,
        docs_url=None,  # routes/docs.py serves it without a content delivery network
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.deps = deps
    app.state.uploads = Uploads(deps.catalog)
    app.state.embeddings = Embeddings(
        deps.caller,
        Tokenizers(deps.repository),
        JsonLimits(deps.settings.json_bytes_max, deps.settings.json_values_max),
    )
    for module in _ROUTES:
        app.include_router(module.router)
    app.include_router(management_api.managed)
    add_error_handlers(app)
    app.add_middleware(UnexpectedErrors)
    app.add_middleware(ReplyBudgetMiddleware, reply_budget=deps.reply_budget)
    app.add_middleware(_HeadAsGet)
    return app


class _App(FastAPI):
    """Describes itself as it behaves: a parameter that does not fit is a 400, and no route answers 422."""

    def openapi(self) -> dict[str, Any]:
        schema = super().openapi()
        for path in schema["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)
        for unused in ("HTTPValidationError", "ValidationError"):
            schema.get("components", {}).get("schemas", {}).pop(unused, None)
        return schema


class _HeadAsGet:
    """ASGI middleware: HEAD is answered as GET; the server leaves the body out and keeps its length."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)
