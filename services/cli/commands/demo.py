"""`millstream version` and `millstream demo`."""

from __future__ import annotations

import asyncio
import platform
from typing import Annotated

import typer

from millstream.services.cli.options import Json, Key, ServerAddress, Url, endpoint


def number() -> str:
    """The installed version of Millstream."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("millstream")
    except PackageNotFoundError:
        return "unknown (not installed)"


def version(json_output: Json = False) -> None:
    """Print the version of Millstream."""
    if json_output:
        from millstream.services.cli.terminal import emit

        emit({"version": number(), "python": platform.python_version(), "system": platform.platform()})
    else:
        print(f"millstream {number()}")


def demo(
    context: typer.Context,
    connections: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Connections to use.")] = 16,
    json_output: Json = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Send held-out handwritten digits one by one, and print accuracy, rate and latency.

    Needs the digits example, which `millstream up` loads unless told not to.
    """
    where = endpoint(context, url, key)
    asyncio.run(_check(where))
    from millstream.examples.digits.demo import run

    raise typer.Exit(run(where.url, connections=connections, json_output=json_output))


async def _check(where: ServerAddress) -> None:
    """Raises Failure, as every command does, if nothing answers or the example is not there."""
    from millstream.services.cli.client import Api

    async with Api(where) as api:
        await api.metadata("digits")
