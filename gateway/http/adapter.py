"""adapter: the record of what one protocol adds to the HTTP application.

gateway/app.py lists the adapters; each protocol's folder has its own in adapter.py, next to its routes and its codec:
routes and their section of the OpenAPI page; paths and the format of their errors
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from fastapi import APIRouter

from millstream.gateway.http.error_formats import PLAIN, ErrorFormat


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
    """Routes that share a section of the OpenAPI page. `keyed`: they need a key, also while no API key exists."""

    router: APIRouter
    tag: Tag | None = None  # None: not on the OpenAPI page
    keyed: bool = False


@dataclass(frozen=True, slots=True)
class Adapter:
    """A protocol over HTTP.

    Args:
        routes: the routes, in the order in which paths are matched and documented.
        error_format: format of the protocol's error replies.
        error_paths: prefixes of the paths whose errors have that format. The longest prefix of all adapters decides; a
            path without a listed prefix has the plain format.
        schemas: types of the bodies that the routes name with `openapi.ref`. The types within them need not be listed.
    """

    routes: tuple[Routes, ...]
    error_format: ErrorFormat = PLAIN
    error_paths: tuple[str, ...] = ()
    schemas: tuple[Any, ...] = ()
