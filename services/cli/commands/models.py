"""`millstream models` and `millstream rm`: list and delete models."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.services.cli.failures import wrong_usage
from millstream.services.cli.options import Endpoint, Json, Key, Name, ServerAddress, server_address

if TYPE_CHECKING:
    from millstream.services.client.documents import ListedVersion, Model


def models(context: typer.Context, json_output: Json = False, endpoint: Endpoint = None, key: Key = None) -> None:
    """List the models and their versions.

    The column WORKERS shows how many of the workers that hold a version are ready.
    """
    from millstream.services.cli.terminal import ago, emit, escape, results, show_rows, size, state

    listed = _models(server_address(context, endpoint, key))
    if json_output:
        emit(listed)
        return
    console = results()
    if not listed:
        console.print("no models yet: `millstream push NAME FILE.onnx` uploads one")
        return
    rows = []
    for model in listed:
        if not model["versions"]:
            model_state = "unloaded" if model["unloaded"] else "failed"
            rows.append([escape(model["name"]), "-", state(model_state), "", "-", "-", "-", "-"])
        rows += [
            [
                escape(model["name"]),
                str(version["version"] or "next"),
                state(version["state"]),
                _role(model, version),
                size(version["size_bytes"]),
                escape(version["pool"] or "-"),
                _ready_on(version),
                ago(version["created"]),
            ]
            for version in model["versions"]
        ]
    columns = ("MODEL", "VERSION", "STATE", "ROLE", "SIZE", "POOL", "WORKERS", "UPLOADED")
    show_rows(console, columns, rows, right=("VERSION", "SIZE", "WORKERS"))


def _models(server: ServerAddress) -> list[Model]:
    from millstream.services.client.client import Client

    with Client(server, retries=0) as client:
        return client.models()


def _role(model: Model, version: ListedVersion) -> str:
    if version["version"] is None:
        return ""
    if version["version"] == model["serving"]:
        return "[bold]serving[/]"
    return "active" if version["version"] == model["active"] else ""


def _ready_on(version: ListedVersion) -> str:
    ready = sum(instance["state"] == "ready" for instance in version["instances"])
    return f"{ready}/{len(version['instances'])}" if version["instances"] else "-"


def rm(
    context: typer.Context,
    name: Name,
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", min=1, help="Only this version; default: the whole model.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking for confirmation.")] = False,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Delete a model, or one version of it.

    Requests in flight are still answered; later requests get "not found". The files are deleted and cannot be restored.
    """
    server = server_address(context, endpoint, key)
    what = f"{name} with all its versions" if version is None else f"{name} version {version}"
    if not yes:
        if not sys.stdin.isatty():
            raise wrong_usage(f"rm would delete {what}: add --yes to delete without confirmation")
        typer.confirm(f"Delete {what}?", abort=True)
    _remove(server, name, version)
    if json_output:
        from millstream.services.cli.terminal import emit

        emit({"deleted": {"model": name, "version": version}})
    else:
        print(f"deleted {what}")


def _remove(server: ServerAddress, name: str, version: int | None) -> None:
    from millstream.services.client.client import Client

    with Client(server, retries=0) as client:
        client.remove(name, version)
