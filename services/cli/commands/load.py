"""`millstream load` and `millstream unload`: which models answer, without touching a file of theirs."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from millstream.services.cli.options import Json, Key, Name, ServerAddress, Url, endpoint

LOAD_S_MAX = 900.0


def load(
    context: typer.Context,
    name: Name,
    config: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='A Triton model configuration for it, such as {"max_batch_size": 8}.'),
    ] = None,
    json_output: Json = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Serve a model: one that was unloaded, or one of a model repository as it is there now.

    What served before goes on until the new one is ready, and if it fails.
    """
    from millstream.services.cli.terminal import duration, emit, working

    began = time.monotonic()
    with working(f"loading {name}", quiet=json_output):
        asyncio.run(_load(endpoint(context, url, key), name, config))
    seconds = round(time.monotonic() - began, 3)
    if json_output:
        emit({"loaded": name, "seconds": seconds})
    else:
        print(f"loaded {name} in {duration(seconds)}")


def unload(context: typer.Context, name: Name, json_output: Json = False, url: Url = None, key: Key = None) -> None:
    """Stop serving a model. Nothing is deleted: `millstream load` serves it again.

    What is on its way is still answered; after that the name is unknown to callers, also when all is started again.
    """
    asyncio.run(_unload(endpoint(context, url, key), name))
    if json_output:
        from millstream.services.cli.terminal import emit

        emit({"unloaded": name})
    else:
        print(f"unloaded {name}")


async def _load(where: ServerAddress, name: str, config: str | None) -> None:
    from millstream.services.cli.client import Api

    async with Api(where) as api:
        await api.load(name, config=config, wait_s=LOAD_S_MAX)


async def _unload(where: ServerAddress, name: str) -> None:
    from millstream.services.cli.client import Api

    async with Api(where) as api:
        await api.model(name)
        await api.unload(name)
