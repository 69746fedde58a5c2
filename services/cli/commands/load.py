"""`millstream load` and `millstream unload`: start and stop serving a model without changing its files."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from millstream.services.cli.options import Json, Key, Name, ServerAddress, Url, server_address

LOAD_S_MAX = 900.0


def load(
    context: typer.Context,
    name: Name,
    config: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='Triton model configuration to use, such as {"max_batch_size": 8}.'),
    ] = None,
    json_output: Json = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Serve a model that was unloaded, or reload one of a Triton model repository from its current files.

    The version that serves now keeps serving until the new one is ready, and also if the load fails.
    """
    from millstream.services.cli.terminal import duration, emit, working

    started = time.monotonic()
    with working(f"loading {name}", quiet=json_output):
        asyncio.run(_load(server_address(context, url, key), name, config))
    seconds = round(time.monotonic() - started, 3)
    if json_output:
        emit({"loaded": name, "seconds": seconds})
    else:
        print(f"loaded {name} in {duration(seconds)}")


def unload(context: typer.Context, name: Name, json_output: Json = False, url: Url = None, key: Key = None) -> None:
    """Stop serving a model. Nothing is deleted: `millstream load` serves it again.

    Requests in flight are still answered; later requests get "not found". The model stays unloaded after a restart.
    """
    asyncio.run(_unload(server_address(context, url, key), name))
    if json_output:
        from millstream.services.cli.terminal import emit

        emit({"unloaded": name})
    else:
        print(f"unloaded {name}")


async def _load(server: ServerAddress, name: str, config: str | None) -> None:
    from millstream.services.cli.client import Api

    async with Api(server) as api:
        await api.load(name, config=config, wait_s=LOAD_S_MAX)


async def _unload(server: ServerAddress, name: str) -> None:
    from millstream.services.cli.client import Api

    async with Api(server) as api:
        await api.model(name)
        await api.unload(name)
