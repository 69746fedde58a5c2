"""`millstream push`: uploads a file as a new model version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.services.cli.failures import usage_of, wrong_usage
from millstream.services.cli.options import Endpoint, Json, Key, Name, ServerAddress, server_address

if TYPE_CHECKING:
    from millstream.services.client.documents import Version

WAIT_S = 300.0


def push(
    context: typer.Context,
    name: Name,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="ONNX file, or a folder, zip, tar or tar.gz with an ONNX file and its external data.",
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
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Upload a model as a new version.

    The server checks the file and the workers load it. Until the new version is ready the current one keeps serving,
    and no request fails. A version never changes: push again to create the next one.
    """
    server = server_address(context, endpoint, key)
    options = {
        "version": version,
        "config": _config(config),
        "activate": activate,
        "wait_s": WAIT_S if wait else 0,
    }
    document = _push(server, name, file, options, quiet=json_output)
    if json_output:
        from millstream.services.cli.terminal import emit

        emit(document)
    else:
        _show(document, server, activate=activate)


def _push(server: ServerAddress, name: str, file: Path, options: dict[str, Any], *, quiet: bool) -> Version:
    """Upload the file with a progress bar; `options` are those of `Client.push`."""
    from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

    from millstream.services.cli.terminal import escape, notices
    from millstream.services.client.client import Client

    columns = (
        SpinnerColumn(finished_text="[green]✓[/]"),
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
    )
    console = notices()
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_interactive) as bar:
        task = bar.add_task(f"Uploading {escape(file.name)}", total=None)

        def sent(sent_bytes: int, size_bytes: int) -> None:
            bar.update(task, completed=sent_bytes, total=size_bytes)
            if sent_bytes == size_bytes:
                bar.update(task, description="Checking" + (", loading and warming up" if options["wait_s"] else ""))

        # The client finds out itself whether it can read the file.
        with usage_of(), Client(server, retries=0) as client:
            return client.push(name, file, **options, progress=sent)


def _config(option: str | None) -> dict[str, Any] | None:
    """Return the JSON object that the option contains or names as a file. Raises UsageFailure."""
    if option is None:
        return None
    text = option
    if not option.lstrip().startswith("{"):
        try:
            text = Path(option).read_text()
        except (OSError, ValueError) as error:
            raise wrong_usage(
                f"--config {option}: pass a JSON object, or a file that contains one ({error})"
            ) from error
    try:
        document = json.loads(text)
    except ValueError as error:
        raise wrong_usage(f"--config: not JSON: {error}") from error
    if not isinstance(document, dict):
        raise wrong_usage('--config: pass a JSON object, like {"rows_max": 32}')
    return document


def _show(document: Version, server: ServerAddress, *, activate: bool) -> None:
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
