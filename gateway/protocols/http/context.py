"""How a route reaches what the application was built with."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from millstream.gateway.catalog.upload_slots import Uploads
from millstream.gateway.protocols.http.deps import Deps


def _deps(request: Request) -> Deps:
    deps = request.app.state.deps
    assert isinstance(deps, Deps)
    return deps


def _uploads(request: Request) -> Uploads:
    uploads = request.app.state.uploads
    assert isinstance(uploads, Uploads)
    return uploads


DepsOf = Annotated[Deps, Depends(_deps)]
UploadsOf = Annotated[Uploads, Depends(_uploads)]
