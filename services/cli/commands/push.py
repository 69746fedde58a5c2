"""`millstream push`: uploads a file as a new model version."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated, Any

import typer

from millstream.services.cli.options import Json, Key, Name, ServerAddress, Url, server_address
from millstream.services.errors import Code, Failure, invalid

WAIT_S = 300.0


def push(
    context: typer.Context,
    name: Name,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="ONNX file, or a zip, tar or tar.gz of an ONNX file and its external data.",
            show_default=False,
        ),
    ],
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", min=1, help="Number of the new version; default: the next.")
    ] = None,
    wait: Annotated[
        bool, typer.Option(help="Wait until the version is ready; exit with code 1 if it fails to load.")
    ] = True,
    activate: Annotated[bool, typer.Option(help="Serve the new version in place of the current one.")] = True,
    config: Annotated[
        str | None,
        typer.Option(metavar="JSON|FILE", help='Model configuration, such as {"rows_max": 32, "pool": "cpu"}.'),
    ] = None,
    json_output: Json = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Upload a model as a new version.

    The server checks the file and the workers load it. Until the new version is ready the current one keeps serving,
    and no request fails. A version never changes: push again to create the next one.
    """
    server = server_address(context, url, key)
    options = {
        "version": version,
        "config": _config(config),
        "activate": activate,
        "wait_s": WAIT_S if wait else 0,
    }
    check_file(file)
    document = asyncio.run(_push(server, name, file, options, quiet=json_output))
    if document["state"] == "failed":
        raise Failure(Code.MODEL, f"{name} version {document['version']} failed: {document['reason']}")
    if json_output:
        from millstream.services.cli.terminal import emit

        emit(document)
    else:
        _show(document, server, activate=activate)


def check_file(path: Path) -> None:
    """Raise Failure(INVALID) unless `path` is a file that is not empty."""
    if not path.is_file():
        raise invalid(f"{path}: there is no such file" if not path.exists() else f"{path}: this is not a file")
    if path.stat().st_size == 0:
        raise invalid(f"{path}: the file is empty")


async def _push(
    server: ServerAddress, name: str, file: Path, options: dict[str, Any], *, quiet: bool
) -> dict[str, Any]:
    """Upload the file with a progress bar; `options` are those of `Api.push`."""
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
                bar.update(task, description="Checking" + (", loading and warming up" if options["wait_s"] else ""))

        async with Api(server) as api:
            return await api.push(name, file, **options, progress=sent)


def _config(option: str | None) -> dict[str, Any] | None:
    """Return the JSON object that the option contains or names as a file. Raises Failure(INVALID)."""
    if option is None:
        return None
    text = option
    if not option.lstrip().startswith("{"):
        try:
            text = Path(option).read_text()
        except (OSError, ValueError) as error:
            raise invalid(f"--config {option}: pass a JSON object, or a file that contains one ({error})") from error
    try:
        document = json.loads(text)
    except ValueError as error:
        raise invalid(f"--config: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise invalid('--config: pass a JSON object, like {"rows_max": 32}')
    return document


def _show(document: dict[str, Any], server: ServerAddress, *, activate: bool) -> None:
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
        console.print(f"not active: only requests that name version {document['version']} reach it")
    elif document["state"] != "ready":
        console.print(f"not ready yet: `millstream describe {name}` shows its state")
    else:
        console.print(f"\nPOST {server.url}/v2/models/{name}/infer")
