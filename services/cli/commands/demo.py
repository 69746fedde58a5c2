"""`millstream version` and `millstream demo`."""

from __future__ import annotations

import platform
from typing import Annotated

import typer

from millstream.services.cli.options import Endpoint, Json, Key, ServerAddress, server_address


def installed_version() -> str:
    """Return the installed version of Millstream."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("millstream")
    except PackageNotFoundError:
        return "unknown (not installed)"


def version(json_output: Json = False) -> None:
    """Print the version of Millstream; with --json also those of Python and the system."""
    if json_output:
        from millstream.services.cli.terminal import emit

        emit({"version": installed_version(), "python": platform.python_version(), "system": platform.platform()})
    else:
        print(f"millstream {installed_version()}")


def demo(
    context: typer.Context,
    connections: Annotated[int, typer.Option(metavar="N", min=1, max=1024, help="Connections to use.")] = 16,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Classify handwritten digits with the example model, and print accuracy, rate and latency.

    Sends images that the model was not trained on, one per request. Needs the example model "digits", which
    `millstream up` loads unless it is started with --no-example.
    """
    server = server_address(context, endpoint, key)
    _check(server)
    from millstream.examples.digits.demo import run

    raise typer.Exit(run(server.url, connections=connections, json_output=json_output, trust=server.trust))


def _check(server: ServerAddress) -> None:
    """Raise Failure if no server answers or the example model is missing."""
    from millstream.services.client.client import Client

    with Client(server, retries=0) as client:
        client.metadata("digits")
