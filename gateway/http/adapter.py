"""The record of what one protocol adds to the HTTP application: the contribution `http` of a plug-in.

gateway/app.py takes the core's adapters and those of the plug-ins. Each has routes with their section of the OpenAPI
page and who may call them, the format of their errors, and what is around the application for them.
`versioned` registers one handler for two paths: of the model's serving version, and of a named version.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

from fastapi import APIRouter
from starlette.types import ASGIApp

from millstream.gateway.http.deps import Deps
from millstream.gateway.http.errors import PLAIN, ErrorFormat, ErrorReplies
from millstream.services.access.scopes import Rows
from millstream.services.settings import Settings


class Place(IntEnum):
    """Where a section is on the OpenAPI page: open at the top, or folded below, the rarest last."""

    OPEN = 0
    FOLDED = 1
    LAST = 2


class Tag(NamedTuple):
    """A section of the OpenAPI page."""

    name: str
    description: str
    place: Place = Place.FOLDED


class Routes(NamedTuple):
    """Routes that share a section of the OpenAPI page.

    Args:
        router: the routes, in the order in which paths are matched and documented.
        tag: their section; None: they are not on the OpenAPI page.
        keyed: whether they need a key, also while no API key exists.
        order: of all routes of the application, the lowest are matched first. The core has v2 at 0 to 99, our other
            protocols at 100 to 199, the admin API at 300 to 399, and the pages for operators at 400.
    """

    router: APIRouter
    tag: Tag | None = None
    keyed: bool = False
    order: int = 500


#: (the application, its parts, what writes its errors) -> what is around it; the application itself: nothing is
Middleware = Callable[[ASGIApp, Deps, ErrorReplies], ASGIApp]


@dataclass(frozen=True, slots=True)
class Adapter:
    """A protocol over HTTP.

    Args:
        routes: the routes.
        access: what the calls of these routes need, by method and template of the path. A call without a row is
            refused.
        protocols: the values of the metrics' label `protocol` of its requests.
        error_format: format of the protocol's error replies.
        error_paths: prefixes of the paths whose errors have that format. The longest prefix of all adapters decides; a
            path without a listed prefix has the plain format.
        middleware: what is around the application.
        of_settings: returns the adapter in place of this one, where paths depend on the settings.
        schemas: types of the bodies that the routes name with `openapi.ref`. The types within them need not be listed.
    """

    routes: tuple[Routes, ...] = ()
    access: Rows = field(default_factory=dict)
    protocols: tuple[str, ...] = ()
    error_format: ErrorFormat = PLAIN
    error_paths: tuple[str, ...] = ()
    schemas: tuple[Any, ...] = ()
    middleware: tuple[Middleware, ...] = ()
    of_settings: Callable[[Settings], Adapter] | None = None


_Handler = TypeVar("_Handler", bound=Callable[..., Awaitable[Any]])


def versioned(
    router: APIRouter, method: str, path: str, summaries: tuple[str, str], **options: Any
) -> Callable[[_Handler], _Handler]:
    """Register a handler under `path` twice: without the part in brackets, which names a version, and with it.

    The second route's name is the handler's name followed by "_version".

    Args:
        router: the router that gets both routes.
        method: the HTTP method.
        path: for example "/v2/models/{model}[/versions/{version}]/infer". The handler's parameter `version` is None if
            the path names no version.
        summaries: summary of the path without a version, and of the path with a version.
        options: options of both routes, as `APIRouter.add_api_route` takes them.
    """
    before, _, rest = path.partition("[")
    part, _, after = rest.partition("]")

    def register(handler: _Handler) -> _Handler:
        signature = inspect.signature(handler, eval_str=True)
        parameters = signature.parameters

        @functools.wraps(handler)
        async def serving(**arguments: Any) -> Any:
            return await handler(version=None, **arguments)

        @functools.wraps(handler)
        async def named(**arguments: Any) -> Any:
            return await handler(**arguments)

        without = [parameter for name, parameter in parameters.items() if name != "version"]
        required = [
            parameter.replace(annotation=str) if name == "version" else parameter
            for name, parameter in parameters.items()
        ]
        for route, route_parameters, name, summary, route_path in (
            (serving, without, handler.__name__, summaries[0], before + after),
            (named, required, f"{handler.__name__}_version", summaries[1], before + part + after),
        ):
            route.__signature__ = signature.replace(parameters=route_parameters)  # type: ignore[attr-defined]
            router.add_api_route(route_path, route, methods=[method], name=name, summary=summary, **options)
        return handler

    return register
