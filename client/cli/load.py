"""`millstream load` and `millstream unload`: start and stop serving a model without changing its files."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from millstream.client.cli.options import Endpoint, Json, Key, Name, ServerAddress, server_address


def load(
    context: typer.Context,
    name: Name,
    config: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='Triton model configuration to use, such as {"max_batch_size": 8}.'),
    ] = None,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Serve a model that was unloaded, or reload one of a Triton model repository from its current files.

    The version that serves now keeps serving until the new one is ready, and also if the load fails.
    """
    from millstream.client.cli.terminal import duration, emit, working

    started = time.monotonic()
    with working(f"loading {name}", quiet=json_output):
        _load(server_address(context, endpoint, key), name, config)
    seconds = round(time.monotonic() - started, 3)
    if json_output:
        emit({"loaded": name, "seconds": seconds})
    else:
        print(f"loaded {name} in {duration(seconds)}")


def unload(
    context: typer.Context, name: Name, json_output: Json = False, endpoint: Endpoint = None, key: Key = None
) -> None:
    """Stop serving a model. Nothing is deleted: `millstream load` serves it again.

    Requests in flight are still answered; later requests get "not found". The model stays unloaded after a restart.
    """
    _unload(server_address(context, endpoint, key), name)
    if json_output:
        from millstream.client.cli.terminal import emit

        emit({"unloaded": name})
    else:
        print(f"unloaded {name}")


def _load(server: ServerAddress, name: str, config: str | None) -> None:
    from millstream.client.client import Client

    with Client(server, retries=0) as client:
        client.load(name, config=config)


def _unload(server: ServerAddress, name: str) -> None:
    from millstream.client.client import Client

    with Client(server, retries=0) as client:
        client.model(name)
        client.unload(name)
