"""`millstream compile undo`: serves a version's own file again, after a compiled form won a race."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from millstream.plugins.compile.cli import serving_version
from millstream.services.cli.options import Endpoint, Json, Key, Name, Version, server_address
from millstream.services.cli.terminal import emit, escape, results


class Action(StrEnum):
    """What to do with the compiled form that serves."""

    UNDO = "undo"


def compile_(
    context: typer.Context,
    action: Annotated[Action, typer.Argument(help="What to do with the compiled form.", show_default=False)],
    name: Name,
    version: Version = None,
    pool: Annotated[
        str | None, typer.Option(metavar="NAME", help="Pool of the race; default: the one that was raced last.")
    ] = None,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Serve the version's own file again: take the verdict of `millstream race` back.

    Workers swap without losing a request. The report of the race stays; `millstream race NAME` begins a new one.
    """
    from millstream.client.client import Client

    del action  # there is one
    with Client(server_address(context, endpoint, key), retries=0) as client:
        number = version if version is not None else serving_version(client, name)
        found = client.undo_race(name, number, pool=pool)
    if json_output:
        emit(found)
        return
    results().print(f"{escape(name)} version {number} is served by its own file")
