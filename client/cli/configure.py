"""`millstream configure`: shows or changes where and how often a model is loaded, its owner and its labels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.client.cli.failures import show_warning
from millstream.client.cli.options import Endpoint, Json, Key, Name, labels_of, open_client
from millstream.client.cli.terminal import emit, escape, labels_text, results, show_detail

if TYPE_CHECKING:
    from millstream.client.documents import EndpointSettings


def configure(
    context: typer.Context,
    name: Name,
    pools: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,NAME",
            help='Pools that may serve it, the preferred one first; "": those of the version.',
        ),
    ] = None,
    instances_min: Annotated[
        int | None, typer.Option(metavar="N", help="Instances that are always loaded; default 0.")
    ] = None,
    instances_max: Annotated[
        int | None, typer.Option(metavar="N", help="Most instances in a pool; default 0, no limit.")
    ] = None,
    idle_s: Annotated[
        float | None,
        typer.Option(
            metavar="S", help="Seconds without a call until it is unloaded; default 0: only if memory is short."
        ),
    ] = None,
    pin: Annotated[
        bool | None,
        typer.Option("--pin/--no-pin", help="Keep a loaded instance, also when memory is short.", show_default="off"),
    ] = None,
    owner: Annotated[
        str | None,
        typer.Option(metavar="KEY", help='Name of the API key that owns it; "": none. It needs the scope admin.'),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="Set a label; NAME= removes it; repeatable."),
    ] = None,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Change where and how often a model is loaded, its owner and labels, or show them, without options.

    The settings hold for the model's name, whatever version it resolves to, and take effect at once. What is not named
    stays as it is.
    """
    changes: dict[str, Any] = {
        "pools": None if pools is None else [pool for part in pools.split(",") if (pool := part.strip())],
        "instances_min": instances_min,
        "instances_max": instances_max,
        "idle_s": idle_s,
        "pin": pin,
        "owner": owner,
        "labels": {name: value or None for name, value in labels_of(label).items()} or None,
    }
    given = {field: value for field, value in changes.items() if value is not None}
    with open_client(context, endpoint, key) as client:
        found = client.configure(name, **given) if given else client.settings(name)
    if json_output:
        emit(found)
        return
    for warning in found["warnings"]:
        show_warning(warning)
    _show(found)


def _show(found: EndpointSettings) -> None:
    console, settings = results(), found["settings"]
    console.print(f"[bold]{escape(found['model'])}[/]")
    pools = escape(", ".join(settings["pools"])) or "those of the version"
    show_detail(console, "  pools           ", pools)
    show_detail(console, "  instances-min   ", str(settings["instances_min"]))
    show_detail(console, "  instances-max   ", str(settings["instances_max"] or "no limit"))
    idle_s = settings["idle_s"]
    show_detail(console, "  idle-s          ", f"{idle_s:g}" if idle_s else "stays loaded while there is memory")
    show_detail(console, "  pin             ", "yes" if settings["pin"] else "no")
    if owner := settings.get("owner"):
        show_detail(console, "  owner           ", escape(owner))
    if labels := settings.get("labels"):
        show_detail(console, "  labels          ", escape(labels_text(labels)))
