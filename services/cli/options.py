"""Options shared by several commands. The command line overrides MILLSTREAM_… variables, which override defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, NamedTuple

import typer

from millstream.services.client.address import URL_DEFAULT, ServerAddress, find_server
from millstream.services.errors import Failure, invalid
from millstream.services.process.printable import printable

Endpoint = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="NAME|URL",
        help="Server to call, by URL or by its name in ~/.config/millstream/config.toml (MILLSTREAM_ENDPOINT); "
        "default: the one `millstream up` started with this home, else the default of config.toml, else "
        + URL_DEFAULT
        + ".",
        rich_help_panel="Server",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        metavar="KEY",
        help="Key of the admin API (api_key of the endpoint in config.toml, or MILLSTREAM_ADMIN_KEY).",
        rich_help_panel="Server",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The model's name.", show_default=False)]
Version = Annotated[
    int | None, typer.Option("--version", metavar="N", min=1, help="Version to call; default: the one serving.")
]


#: options whose name differs from their setting's
_OPTIONS = {
    "pools": "pool",
    "preload_example": "example",
    "redis_url": "redis",
    "triton_repositories": "triton-repository",
}


class Shared(NamedTuple):
    """Options before the name of the command, which apply unless the command has its own."""

    endpoint: str | None = None
    key: str | None = None


def load_settings(**overrides: Any) -> Any:
    """Return `Settings` from the environment, overridden by the `overrides` that are not None.

    Raises Failure(INVALID), which names the option or variable.
    """
    # Imported here: pydantic takes longer to import than everything else that `millstream --help` needs.
    from pydantic import ValidationError

    from millstream.services.settings import Settings, explain, variable_of

    options = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**options)
    except ValidationError as error:
        name, problem = explain(error)
        source = f"--{_OPTIONS.get(name, name.replace('_', '-'))}" if name in options else variable_of(name)
        raise invalid(f"{source}: {problem}") from None


def server_address(context: typer.Context, endpoint: str | None, key: str | None) -> ServerAddress:
    """Return the server to call: from the command's options, those before its name, or what `find_server` finds."""
    shared = context.obj if isinstance(context.obj, Shared) else Shared()
    server = find_server(endpoint or shared.endpoint, key or shared.key, "--endpoint")
    for warning in server.warnings:
        typer.secho("warning: ", fg="yellow", bold=True, err=True, nl=False)
        typer.echo(printable(warning), err=True)
    return replace(server, warnings=())  # they are shown now


__all__ = ["Endpoint", "Failure", "Json", "Key", "Name", "ServerAddress", "Version", "load_settings", "server_address"]
