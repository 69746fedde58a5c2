"""Options shared by several commands. The command line overrides MILLSTREAM_… variables, which override defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from millstream.services.errors import Failure, invalid

URL_DEFAULT = "http://127.0.0.1:8000"

Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        metavar="URL",
        help="Server to call (MILLSTREAM_URL); default: the one `millstream up` started with this home, else "
        + URL_DEFAULT
        + ".",
        rich_help_panel="Server",
    ),
]
Key = Annotated[
    str | None,
    typer.Option("--key", metavar="KEY", help="Key of the admin API (MILLSTREAM_ADMIN_KEY).", rich_help_panel="Server"),
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


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The URL of a running server, and the key of its admin API if it needs one."""

    url: str
    key: str | None = None


def load_settings(**overrides: Any) -> Any:
    """Return `Settings` from the environment, overridden by the `overrides` that are not None.

    Raises Failure(INVALID), which names the option or variable.
    """
    # Imported here: pydantic takes longer to import than everything else that `millstream --help` needs.
    from pydantic import ValidationError

    from millstream.services.settings import Settings, explain

    options = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**options)
    except ValidationError as error:
        name, problem = explain(error)
        source = f"--{_OPTIONS.get(name, name.replace('_', '-'))}" if name in options else f"MILLSTREAM_{name.upper()}"
        raise invalid(f"{source}: {problem}") from None


def server_address(context: typer.Context, url: str | None, key: str | None) -> ServerAddress:
    """Return the server to call: from the command's options, those before its name, the environment, or the home."""
    shared = context.obj if isinstance(context.obj, ServerAddress) else ServerAddress("")
    settings = load_settings()
    secret = settings.admin_key.get_secret_value() if settings.admin_key else None
    address = url or shared.url or settings.url or _url_of_home(settings.home) or URL_DEFAULT
    if not address.startswith(("http://", "https://")):
        raise invalid(f"--url {address}: write http://HOST:PORT or https://HOST")
    return ServerAddress(address.rstrip("/"), key or shared.key or secret)


def _url_of_home(home: Any) -> str | None:
    try:
        return str((home / "run" / "url").read_text()).strip() or None
    except OSError:
        return None


__all__ = ["Failure", "Json", "Key", "Name", "ServerAddress", "Url", "Version", "load_settings", "server_address"]
