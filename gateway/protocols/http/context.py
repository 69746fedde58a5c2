"""DepsOf: a route's parameter that gives it the parts which the application was built on."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from millstream.gateway.protocols.http.deps import Deps


def deps_of(request: Request) -> Deps:
    deps = request.app.state.deps
    assert isinstance(deps, Deps)
    return deps


DepsOf = Annotated[Deps, Depends(deps_of)]
