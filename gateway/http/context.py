"""DepsOf, the parameter by which a route gets the parts of the gateway."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from millstream.gateway.http.deps import Deps


def deps_of(request: Request) -> Deps:
    """Return the parts of the gateway that the application was built with."""
    deps = request.app.state.deps
    assert isinstance(deps, Deps)
    return deps


DepsOf = Annotated[Deps, Depends(deps_of)]
