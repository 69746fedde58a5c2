"""Builds the HTTP application from the adapters of its protocols. The fast path for infer requests is below it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import orjson
from fastapi import FastAPI
from fastapi.params import Depends
from fastapi.routing import APIRoute
from fastapi.telemetry import TelemetryConfig
from starlette.types import ASGIApp, Receive, Scope, Send

from millstream.gateway.access.audit_trail import AuditTrail
from millstream.gateway.admin import routes_server as admin
from millstream.gateway.connection.infer_handler import METHOD
from millstream.gateway.http import operation
from millstream.gateway.http.adapter import Adapter, Place
from millstream.gateway.http.auth import CallMiddleware, authorize_by, bearer, platform_of
from millstream.gateway.http.deps import Deps
from millstream.gateway.http.errors import ErrorFormats, ErrorReplies, documented
from millstream.gateway.http.openapi import OPEN
from millstream.gateway.http.openapi_document import complete
from millstream.gateway.observing.observed_http import ObservedApp
from millstream.gateway.v2 import routes_models as v2
from millstream.services.plugin.registry import contributions
from millstream.services.settings import Settings

_DESCRIPTION = """\
Upload a model, and call it over the protocol that your client already speaks.

The operations of a model are the same in all protocols: those without a version in their path use the version that
serves. Replies to errors have the form of the path's protocol. Before a path is known, a request may be refused as
`{"error": "…"}`: 400 (it is not HTTP), 408 (it arrives too slowly), 503 (there are too many connections). A call of a
web page of another origin, or for another host, is answered 403.
"""

#: With the defaults FastAPI looks for a provider of OpenTelemetry in each request; the plug-in tracing makes spans.
_NO_TELEMETRY: TelemetryConfig = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}
CORE = (v2.ADAPTER, admin.ADAPTER, operation.ADAPTER)


def adapters() -> tuple[Adapter, ...]:
    """Return the adapters of the core and of the plug-ins that are on."""
    return (*CORE, *contributions("http", Adapter))


def served_adapters(settings: Settings) -> tuple[Adapter, ...]:
    """Return the adapters with the paths that the settings name."""
    return tuple(one if one.of_settings is None else one.of_settings(settings) for one in adapters())


def build_app(deps: Deps) -> FastAPI:
    """Return the application over `deps`; its lifespan awaits `deps.start` and `deps.stop`."""
    audit = AuditTrail(deps.audit)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await deps.start()
        try:
            yield
        finally:
            await audit.close()
            await deps.stop()

    settings = deps.settings

    def is_open(path: str) -> bool:
        return platform_of(settings, path) is not None

    served = served_adapters(settings)
    app = _App(
        served,
        is_open,
        version=deps.version,
        lifespan=lifespan,
        telemetry=_NO_TELEMETRY,
    )
    app.state.deps = deps
    replies = ErrorReplies(app.error_formats)
    replies.handle_errors_of(app)
    app.add_middleware(CallMiddleware, deps=deps, audit=audit, replies=replies, is_keyless=is_open)
    if deps.observer is not None:
        app.add_middleware(ObservedApp, observer=deps.observer)
    for middleware in (middleware for adapter in served for middleware in adapter.middleware):
        app.add_middleware(middleware, deps, replies)  # outside of all that looks at the path
    app.add_middleware(_HeadAsGet)
    return app


def api_document(version: str) -> dict[str, Any]:
    """Return the OpenAPI document of a server with a key and the digits example, for docs/openapi.json."""
    return _App(adapters(), lambda _: False, version=version).openapi()


class _App(FastAPI):
    """The routes of all adapters, and their OpenAPI document."""

    def __init__(self, served: Sequence[Adapter], is_open: Callable[[str], bool], **options: Any) -> None:
        super().__init__(
            title="Millstream",
            summary="Model serving: upload a model, send it requests.",
            description=_DESCRIPTION,
            license_info={"name": "Apache License 2.0", "identifier": "Apache-2.0"},
            contact={"name": "The Millstream authors"},
            servers=[{"url": "/", "description": "This server."}],
            generate_unique_id_function=_operation_id,
            openapi_url=None,  # gateway/http/operation.py serves it, and /docs without a content delivery network
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            **options,
        )
        self.error_formats = ErrorFormats(
            {path: adapter.error_format for adapter in served for path in adapter.error_paths}
        )
        self._schemas = [kind for adapter in served for kind in adapter.schemas]
        self._is_open = is_open
        self._making = threading.Lock()
        self._document: dict[str, Any] | None = None
        self._text = b""
        self._include_routes(served)

    def _include_routes(self, served: Sequence[Adapter]) -> None:
        tags = {}
        found = [(routes, authorize_by(adapter.access)) for adapter in served for routes in adapter.routes]
        for routes, authorize in sorted(found, key=lambda one: one[0].order):
            if routes.tag is not None:
                tags[routes.tag.name] = routes.tag
            self.include_router(
                routes.router,
                tags=None if routes.tag is None else [routes.tag.name],
                dependencies=[Depends(authorize), *((Depends(bearer),) if routes.keyed else ())],
                responses=documented(401, 403) if routes.keyed else None,
            )
        self.openapi_tags = [
            {"name": tag.name, "description": tag.description, OPEN: tag.place is Place.OPEN}
            for tag in sorted(tags.values(), key=lambda tag: tag.place)
        ]

    def openapi(self) -> dict[str, Any]:
        """Return the document. It is made once, which takes some tenths of a second."""
        with self._making:
            if self._document is None:
                self._document = complete(super().openapi(), self._schemas, self.error_formats, self._is_open)
                self._text = orjson.dumps(self._document)
            return self._document

    def openapi_json(self) -> bytes:
        """Return the document as JSON. Blocks while it is made."""
        self.openapi()
        return self._text


def _operation_id(route: APIRoute) -> str:
    """Return the name of the route's handler, which clients that are generated from the document use, too."""
    return route.name


class _HeadAsGet:
    """ASGI middleware: runs HEAD as GET; the server drops the body and keeps Content-Length."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET", METHOD: "HEAD"}
        await self.app(scope, receive, send)
