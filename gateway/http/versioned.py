"""Registers one handler for two paths: of the model's serving version, and of a named version."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import APIRouter

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
