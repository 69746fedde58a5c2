"""Options shared by several commands. The command line overrides MILLSTREAM_… variables, which override defaults."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from millstream.client.address import URL_DEFAULT, ServerAddress, find_server, is_of_home
from millstream.client.cli.failures import show_warning, usage_of, wrong_usage
from millstream.services.environment import client_variable
from millstream.services.model.names import check_name

if TYPE_CHECKING:
    from millstream.client.client import Client


def _valid_name(name: str) -> str:
    with usage_of():
        return check_name(name)


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
Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="The model's name.",
        show_default=False,
        callback=_valid_name,
    ),
]
ModelName = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="Only this model.",
        show_default=False,
        callback=lambda name: None if name is None else _valid_name(name),
    ),
]
Version = Annotated[
    int | None, typer.Option("--version", metavar="N", min=1, help="Version to call; default: the one serving.")
]


#: options whose name differs from their setting's
_OPTIONS = {
    "pools": "pool",
    "redis_url": "redis",
    "tls_cert_file": "tls-cert",
    "tls_key_file": "tls-key",
    "triton_repositories": "triton-repository",
    "worker_memory": "memory",
}


class Shared(NamedTuple):
    """Options before the name of the command, which apply unless the command has its own."""

    endpoint: str | None = None
    key: str | None = None


def load_settings(**overrides: Any) -> Any:
    """Return the settings from the environment, overridden by the `overrides` that are not None.

    Raises UsageFailure, which names the option or variable.
    """
    # Imported here: pydantic takes longer to import than everything else that `millstream --help` needs.
    from pydantic import ValidationError

    from millstream.services.settings import explain, settings_class, variable_of

    options = {name: value for name, value in overrides.items() if value is not None}
    try:
        return settings_class()(**options)
    except ValidationError as error:
        name, problem = explain(error)
        source = f"--{_OPTIONS.get(name, name.replace('_', '-'))}" if name in options else variable_of(name)
        raise wrong_usage(f"{source}: {problem}") from None


def labels_of(given: list[str] | None) -> dict[str, str]:
    """Return the labels of options like --label team=a. Raises UsageFailure."""
    for text in given or ():
        if "=" not in text:
            raise wrong_usage(f"--label: {text[:80]!r} is no label: write NAME=VALUE")
    return dict(text.split("=", 1) for text in given or ())


def server_address(context: typer.Context, endpoint: str | None, key: str | None) -> ServerAddress:
    """Return the server to call: from the command's options, those before its name, or what `find_server` finds."""
    shared = context.obj if isinstance(context.obj, Shared) else Shared()
    with usage_of():
        server = find_server(endpoint or shared.endpoint, key or shared.key, "--endpoint")
    for warning in server.warnings:
        show_warning(warning)
    return replace(server, warnings=())  # they are shown now


def open_client(context: typer.Context, endpoint: str | None, key: str | None) -> Client:
    """Return a client of the server to call, to be used in a `with` block. Calls are not repeated."""
    # Imported here: the help of all commands must not wait for numpy.
    from millstream.client.client import Client

    return Client(server_address(context, endpoint, key), retries=0)


def asked_endpoint(context: typer.Context, endpoint: str | None, key: str | None) -> ServerAddress | None:
    """Return the server that --endpoint names; None without the option: the command is about this machine then."""
    shared = context.obj if isinstance(context.obj, Shared) else Shared()
    return server_address(context, endpoint, key) if endpoint or shared.endpoint else None


def local_home(context: typer.Context, home: Path | None) -> Path:
    """Return the folder whose processes and files a command is about, which no server gives over the network.

    Raises UsageFailure if the endpoint that the user calls is another server than the one of this folder.
    """
    settings = load_settings(home=home)
    folder: Path = settings.home.expanduser().resolve()
    shared = context.obj if isinstance(context.obj, Shared) else Shared()
    endpoint = shared.endpoint or (None if home else client_variable("MILLSTREAM_ENDPOINT"))
    if endpoint:
        source = "--endpoint" if shared.endpoint else "MILLSTREAM_ENDPOINT"
        with usage_of():
            url = find_server(endpoint, None, source).url
        if not is_of_home(url, folder):
            raise wrong_usage(
                f"{source} {endpoint}: `{context.info_name}` needs the server's own folder, and in {folder} runs "
                "another server or none: call it on that server's machine with --home"
            )
    return folder
