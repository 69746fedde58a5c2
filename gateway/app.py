"""Builds the HTTP application from the adapters of its protocols. The fast path for infer requests is below it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.params import Depends
from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.gateway.admin import adapter as admin
from millstream.gateway.protocols.http import operation
from millstream.gateway.protocols.http.count_replies import METHOD, CountReplies
from millstream.gateway.protocols.http.deps import Deps
from millstream.gateway.protocols.http.error_formats import ErrorFormats
from millstream.gateway.protocols.http.errors import ErrorReplies, UnexpectedErrors, describe_errors, documented
from millstream.gateway.protocols.http.reply_budget_middleware import ReplyBudgetMiddleware
from millstream.gateway.protocols.openai import adapter as openai
from millstream.gateway.protocols.sagemaker import adapter as sagemaker
from millstream.gateway.protocols.tfserving import adapter as tfserving
from millstream.gateway.protocols.torchserve import adapter as torchserve
from millstream.gateway.protocols.v2 import adapter as v2

_DESCRIPTION = "Model serving: upload a model, send it requests."

#: In the order of the OpenAPI page. A new protocol is a folder in protocols/ and a line here.
ADAPTERS = (
    v2.ADAPTER,
    tfserving.ADAPTER,
    sagemaker.ADAPTER,
    openai.ADAPTER,
    torchserve.ADAPTER,
    admin.ADAPTER,
    operation.ADAPTER,
)


def build_app(deps: Deps) -> FastAPI:
    """Return the application over `deps`; its lifespan awaits `deps.start` and `deps.stop`."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await deps.start()
        try:
            yield
        finally:
            await deps.stop()

    formats = ErrorFormats({path: adapter.error_format for adapter in ADAPTERS for path in adapter.error_paths})
    app = _App(
        formats,
        title="Millstream",
        version=deps.version,
        description=_DESCRIPTION,
        docs_url=None,  # protocols/http/docs.py serves it without a content delivery network
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    app.state.deps = deps
    _include_routes(app)
    replies = ErrorReplies(formats)
    replies.handle_errors_of(app)
    app.add_middleware(UnexpectedErrors, replies=replies)
    app.add_middleware(ReplyBudgetMiddleware, reply_budget=deps.reply_budget)
    app.add_middleware(CountReplies, counts=deps.http_counts)
    app.add_middleware(_HeadAsGet)
    return app


def _include_routes(app: FastAPI) -> None:
    tags = {}
    for routes in (routes for adapter in ADAPTERS for routes in adapter.routes):
        if routes.tag is not None:
            tags[routes.tag.name] = {"name": routes.tag.name, "description": routes.tag.description}
        app.include_router(
            routes.router,
            tags=None if routes.tag is None else [routes.tag.name],
            dependencies=None if routes.authorize is None else [Depends(routes.authorize)],
            responses=None if routes.authorize is None else documented(401, 403),
        )
    app.openapi_tags = list(tags.values())


class _App(FastAPI):
    """Its OpenAPI document has no 422: a parameter that does not fit is answered with 400."""

    def __init__(self, error_formats: ErrorFormats, **options: Any) -> None:
        super().__init__(**options)
        self._error_formats = error_formats

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            schema = super().openapi()
            for path in schema["paths"].values():
                for call in path.values():
                    call["responses"].pop("422", None)
            for unused in ("HTTPValidationError", "ValidationError"):
                schema.get("components", {}).get("schemas", {}).pop(unused, None)
            describe_errors(schema, self._error_formats)
        return super().openapi()


class _HeadAsGet:
    """ASGI middleware: runs HEAD as GET; the server drops the body and keeps Content-Length."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", METHOD: "HEAD"}
        await self.app(scope, receive, send)
