"""The record of what one protocol adds to the HTTP application: the contribution `http` of a plug-in.

gateway/app.py takes the core's adapters and those of the plug-ins. Each has routes with their section of the OpenAPI
page and who may call them, the format of their errors, and what is around the application for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

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
