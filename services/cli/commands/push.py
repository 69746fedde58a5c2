"""`millstream push`: a file becomes a version."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from millstream.services.cli.options import Json, Key, Name, ServerAddress, Url, endpoint
from millstream.services.errors import Code, Failure, invalid

WAIT_S = 300.0


def push(
    context: typer.Context,
    name: Name,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="ONNX file, or a zip or tar of one with its external data.", show_default=False
        ),
    ],
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", min=1, help="The number to give; default: the next one.")
    ] = None,
    wait: Annotated[bool, typer.Option(help="Wait until the version is ready, and fail if it fails.")] = True,
    activate: Annotated[bool, typer.Option(help="Make it the version that answers.")] = True,
    config: Annotated[
        str | None,
        typer.Option(metavar="JSON|FILE", help='What to say about it, such as {"rows_max": 32, "pool": "cpu"}.'),
    ] = None,
    json_output: Json = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Upload a model as a new version.

    The file is checked, given a number and loaded by the workers. Until it is ready the version before it goes on
    answering; no request fails in between. Versions never change: push again for a new one.
    """
    where = endpoint(context, url, key)
    said = _config(config)
    check_file(file)
    document = asyncio.run(_push(where, name, file, version, said, activate, wait, quiet=json_output))
    if document["state"] == "failed":
        raise Failure(Code.MODEL, f"{name} version {document['version']} failed: {document['reason']}")
    if json_output:
        from millstream.services.cli.terminal import emit

        emit(document)
    else:
        _show(document, where, activate=activate)


def check_file(path: Path) -> None:
    """Raises Failure(INVALID) unless `path` is a file with something in it."""
    if not path.is_file():
        raise invalid(f"{path}: there is no such file" if not path.exists() else f"{path}: this is not a file")
    if path.stat().st_size == 0:
        raise invalid(f"{path}: the file is empty")


async def _push(
    where: ServerAddress,
    name: str,
    file: Path,
    version: int | None,
    config: dict[str, Any] | None,
    activate: bool,
    wait: bool,
    *,
    quiet: bool,
) -> dict[str, Any]:
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

    from millstream.services.cli.client import Api
    from millstream.services.cli.terminal import escape, notices

    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    console = notices()
    size = file.stat().st_size
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(f"Uploading {escape(file.name)}", total=size)

        def sent(number: int) -> None:
            bar.update(task, advance=number)
            if bar.tasks[0].completed >= size:
                bar.update(task, description="Checking" + (", loading and warming up" if wait else ""))

        async with Api(where) as api:
            return await api.push(
                name,
                file,
                version=version,
                config=config,
                activate=activate,
                wait_s=WAIT_S if wait else 0,
                progress=sent,
            )


def _config(given: str | None) -> dict[str, Any] | None:
    if given is None:
        return None
    text = given
    if not given.lstrip().startswith("{"):
        try:
            text = Path(given).read_text()
        except (OSError, ValueError) as error:
            raise invalid(f"--config {given}: give a JSON object, or a file with one ({error})") from error
    try:
        document = json.loads(text)
    except ValueError as error:
        raise invalid(f"--config: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise invalid('--config: give a JSON object, like {"rows_max": 32}')
    return document


def _show(document: dict[str, Any], where: ServerAddress, *, activate: bool) -> None:
    from millstream.services.cli.commands.describe import batching, tensors
    from millstream.services.cli.terminal import escape, results, size, state

    console = results()
    name = escape(document["model"])
    console.print(
        f"[bold]{name}[/] version {document['version']}  {state(document['state'])}  "
        f"{size(document['size_bytes'])}  [dim]sha256 {document['digest'][:12]}[/]"
    )
    console.print(f"  inputs   {escape(tensors(document['inputs']))}")
    console.print(f"  outputs  {escape(tensors(document['outputs']))}")
    console.print(f"  batching {escape(batching(document))}")
    for note in document["notes"]:
        console.print(f"  [yellow]note[/]     {escape(note)}")
    if not activate:
        console.print(f"not active: requests that name version {document['version']} reach it")
    elif document["state"] != "ready":
        console.print(f"on its way: see `millstream describe {name}`")
    else:
        console.print(f"\nPOST {where.url}/v2/models/{name}/infer")
