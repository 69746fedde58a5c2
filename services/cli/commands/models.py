"""`millstream models` and `millstream rm`: what is there, and away with it."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated, Any

import typer

from millstream.services.cli.options import Json, Key, Name, ServerAddress, Url, endpoint
from millstream.services.errors import invalid


def models(context: typer.Context, json_output: Json = False, url: Url = None, key: Key = None) -> None:
    """List the models and their versions."""
    from millstream.services.cli.terminal import ago, emit, escape, results, size, state, table

    found = asyncio.run(_models(endpoint(context, url, key)))
    if json_output:
        emit(found)
        return
    console = results()
    if not found:
        console.print("no models yet: `millstream push NAME FILE.onnx` uploads one")
        return
    rows = table(
        "MODEL", "VERSION", "STATE", "", "SIZE", "POOL", "WORKERS", "UPLOADED", right=("VERSION", "SIZE", "WORKERS")
    )
    for model in found:
        if not model["versions"]:
            what = "unloaded" if model["unloaded"] else "failed"
            rows.add_row(escape(model["name"]), "-", state(what), "", "-", "-", "-", "-")
        for number, version in enumerate(model["versions"]):
            rows.add_row(
                escape(model["name"]) if number == 0 else "",
                str(version["version"] or "next"),
                state(version["state"]),
                _role(model, version),
                size(version["size_bytes"]),
                escape(version["pool"] or "-"),
                _ready_on(version),
                ago(version["created"]),
            )
    console.print(rows)


async def _models(where: ServerAddress) -> list[dict[str, Any]]:
    from millstream.services.cli.client import Api

    async with Api(where) as api:
        return await api.models()


def _role(model: dict[str, Any], version: dict[str, Any]) -> str:
    if version["version"] is None:
        return ""
    if version["version"] == model["serving"]:
        return "[bold]serving[/]"
    return "active" if version["version"] == model["active"] else ""


def _ready_on(version: dict[str, Any]) -> str:
    ready = sum(instance["state"] == "ready" for instance in version["instances"])
    return f"{ready}/{len(version['instances'])}" if version["instances"] else "-"


def rm(
    context: typer.Context,
    name: Name,
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", min=1, help="Only this version; default: the whole model.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json_output: Json = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Delete a model, or one version of it.

    What is on its way is still answered; after that the name or the version is unknown. There is no way back.
    """
    where = endpoint(context, url, key)
    what = f"{name} with all its versions" if version is None else f"{name} version {version}"
    if not yes:
        if not sys.stdin.isatty():
            raise invalid(f"rm would delete {what}: say --yes where nobody can be asked")
        typer.confirm(f"Delete {what}?", abort=True)
    asyncio.run(_remove(where, name, version))
    if json_output:
        from millstream.services.cli.terminal import emit

        emit({"deleted": {"model": name, "version": version}})
    else:
        print(f"deleted {what}")


async def _remove(where: ServerAddress, name: str, version: int | None) -> None:
    from millstream.services.cli.client import Api

    async with Api(where) as api:
        await api.remove(name, version)
