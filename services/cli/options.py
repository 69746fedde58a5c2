"""Options that several commands share, and where they lead: command line, else MILLSTREAM_…, else the home's own."""

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
        help="Endpoint to talk to (MILLSTREAM_URL); default: the one `millstream up` started here, else "
        + URL_DEFAULT
        + ".",
        rich_help_panel="Endpoint",
    ),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key", metavar="KEY", help="Key of the admin API (MILLSTREAM_ADMIN_KEY).", rich_help_panel="Endpoint"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The model's name.", show_default=False)]
Version = Annotated[
    int | None, typer.Option("--version", metavar="N", min=1, help="A version; default: the one that is serving.")
]


#: options with another name than their setting
_OPTIONS = {
    "pools": "pool",
    "preload_example": "example",
    "redis_url": "redis",
    "triton_repositories": "triton-repository",
}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A running Millstream and, where it wants one, the key of its admin API."""

    url: str
    key: str | None = None


def load_settings(**overrides: Any) -> Any:
    """`Settings`, with those of `overrides` that are not None on top. Raises Failure(INVALID), one line."""
    # Imported here: pydantic costs more than everything else `millstream --help` needs.
    from pydantic import ValidationError

    from millstream.services.settings import Settings, explain

    given = {name: value for name, value in overrides.items() if value is not None}
    try:
        return Settings(**given)
    except ValidationError as error:
        name, problem = explain(error)
        where = f"--{_OPTIONS.get(name, name.replace('_', '-'))}" if name in given else f"MILLSTREAM_{name.upper()}"
        raise invalid(f"{where}: {problem}") from None


def endpoint(context: typer.Context, url: str | None, key: str | None) -> ServerAddress:
    """Where a command goes: its own options, those before the command's name, the environment, the home."""
    shared = context.obj if isinstance(context.obj, ServerAddress) else ServerAddress("")
    settings = load_settings()
    secret = settings.admin_key.get_secret_value() if settings.admin_key else None
    found = url or shared.url or settings.url or _url_of_home(settings.home) or URL_DEFAULT
    if not found.startswith(("http://", "https://")):
        raise invalid(f"--url {found}: write http://HOST:PORT or https://HOST")
    return ServerAddress(found.rstrip("/"), key or shared.key or secret)


def _url_of_home(home: Any) -> str | None:
    try:
        return str((home / "run" / "url").read_text()).strip() or None
    except OSError:
        return None


__all__ = ["Failure", "Json", "Key", "Name", "ServerAddress", "Url", "Version", "endpoint", "load_settings"]
