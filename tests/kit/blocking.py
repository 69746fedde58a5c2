"""Lets synchronous tests call asyncio clients: each call runs to its end."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any


class Blocking:
    """Wraps an asyncio client in the interface of the synchronous one, so that one test covers both."""

    def __init__(self, client: Any, runner: asyncio.Runner) -> None:
        self._client = client
        self._runner = runner

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)

        async def call(*arguments: Any, **options: Any) -> Any:
            result = method(*arguments, **options)
            return await result if inspect.isawaitable(result) else result

        return lambda *arguments, **options: self._runner.run(call(*arguments, **options))
