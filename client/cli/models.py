"""`millstream models`, `activate`, `load`, `unload` and `rm`: list models, choose what serves, delete."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.client.cli.failures import wrong_usage
from millstream.client.cli.options import Endpoint, Json, Key, Name, labels_of, open_client
from millstream.client.cli.terminal import (
    ago,
    duration,
    emit,
    escape,
    labels_text,
    results,
    show_rows,
    size,
    state,
    working,
)
from millstream.services.errors import Code, Failure

if TYPE_CHECKING:
    from millstream.client.documents import ListedVersion, Model

WAIT_S = 300.0


def models(
    context: typer.Context,
    owner: Annotated[
        str | None, typer.Option(metavar="KEY", help='Only those that an API key of this name owns; "": nobody.')
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="Only those with this label; repeatable.")
    ] = None,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """List the models and their versions.

    The column WORKERS shows how many of the workers that hold a version are ready.
    """
    labels = labels_of(label)
    with open_client(context, endpoint, key) as client:
        listed = client.models(owner=owner, labels=labels)
    if json_output:
        emit(listed)
        return
    console = results()
    if not listed and (labels or owner is not None):
        console.print("no such models")
        return
    if not listed:
        console.print("no models yet: `millstream push NAME FILE.onnx` uploads one")
        return
    rows = []
    for model in listed:
        if not model["versions"]:
            model_state = "unloaded" if model["unloaded"] else ("failed" if model["reason"] else "empty")
            rows.append([escape(model["name"]), "-", state(model_state), "", "-", "-", "-", "-", *_team(model)])
        rows += [
            [
                escape(model["name"]),
                str(version["version"] or "next"),
                state(version["state"]),
                _role(model, version),
                size(version["size_bytes"]),
                escape(", ".join(version["pools"]) or "-"),
                _ready_on(version),
                ago(version["created"]),
                *_team(model),
            ]
            for version in model["versions"]
        ]
    columns = ("MODEL", "VERSION", "STATE", "ROLE", "SIZE", "POOLS", "WORKERS", "UPLOADED", "OWNER", "LABELS")
    shown = len(columns) if any(any(row[-2:]) for row in rows) else len(columns) - 2
    show_rows(console, columns[:shown], [row[:shown] for row in rows], right=("VERSION", "SIZE", "WORKERS"))


def _team(model: Model) -> tuple[str, str]:
    return escape(model.get("owner", "")), escape(labels_text(model.get("labels", {})))


def _role(model: Model, version: ListedVersion) -> str:
    if version["version"] is None:
        return ""
    if version["version"] == model["serving"]:
        return "[bold]serving[/]"
    return "active" if version["version"] == model["active"] else ""


def _ready_on(version: ListedVersion) -> str:
    ready = sum(instance["state"] == "ready" for instance in version["instances"])
    return f"{ready}/{len(version['instances'])}" if version["instances"] else "-"


def activate(
    context: typer.Context,
    name: Name,
    version: Annotated[int, typer.Argument(metavar="VERSION", min=1, help="The version that is to answer.")],
    wait: Annotated[
        bool, typer.Option(help="Wait until it is ready, at most 5 minutes; exit with code 1 if it is not.")
    ] = True,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Make a version the one that answers requests for the model, for a rollout or to go back.

    The previous version answers until this one is ready: no request fails in between. Requests that name a version
    reach that one as before.
    """
    with (
        open_client(context, endpoint, key) as client,
        working(f"activating {name} version {version}", quiet=json_output),
    ):
        model = client.activate(name, version)
        if wait and model["serving"] != version:
            client.wait(name, version, timeout=WAIT_S)
            model = client.model(name)
    if json_output:
        emit(model)
    elif model["serving"] == version:
        print(f"{name} version {version} is serving")
    else:
        print(f"{name} version {version} serves when it is ready")


def load(
    context: typer.Context,
    name: Name,
    config: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='Triton model configuration to use, such as {"max_batch_size": 8}.'),
    ] = None,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Serve a model that was unloaded, or reload one of a Triton model repository from its current files.

    The version that serves now keeps serving until the new one is ready, and also if the load fails.
    """
    started = time.monotonic()
    with open_client(context, endpoint, key) as client, working(f"loading {name}", quiet=json_output):
        client.load(name, config=config)
    seconds = round(time.monotonic() - started, 3)
    if json_output:
        emit({"loaded": name, "seconds": seconds})
    else:
        print(f"loaded {name} in {duration(seconds)}")


def unload(
    context: typer.Context, name: Name, json_output: Json = False, endpoint: Endpoint = None, key: Key = None
) -> None:
    """Stop serving a model. Nothing is deleted: `millstream load` serves it again.

    Requests in flight are still answered; later requests get "not found". The model stays unloaded after a restart.
    """
    with open_client(context, endpoint, key) as client:
        client.model(name)
        client.unload(name)
    if json_output:
        emit({"unloaded": name})
    else:
        print(f"unloaded {name}")


def rm(
    context: typer.Context,
    name: Name,
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", min=1, help="Only this version; default: the whole model.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Delete without asking for confirmation.")] = False,
    force: Annotated[
        bool, typer.Option("--force", "-f", help="Delete without asking, and also a version that is serving.")
    ] = False,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Delete a model, or one version of it; the model goes with its only version.

    Requests in flight are still answered; later requests get "not found". The files are deleted and cannot be restored.
    Asks first on a terminal; elsewhere, --yes or --force is needed.
    """
    what = f"{name} with all its versions" if version is None else f"{name} version {version}"
    if not yes and not force:
        if not sys.stdin.isatty():
            raise wrong_usage(f"rm would delete {what}: add --yes to delete without confirmation")
        if not typer.confirm(f"Delete {what}?", err=True):
            raise Failure(Code.CANCELLED, "nothing was deleted")
    try:
        with open_client(context, endpoint, key) as client:
            client.remove(name, version, force=force)
    except Failure as failure:
        if failure.code is not Code.CONFLICT or force:
            raise
        raise Failure(failure.code, f"{failure.message} (here: --force)") from failure
    if json_output:
        emit({"deleted": {"model": name, "version": version}})
    else:
        print(f"deleted {what}")
