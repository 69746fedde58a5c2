"""`millstream push`: uploads a file as a new model version."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from millstream.client.address import ServerAddress
from millstream.client.cli.failures import usage_of, wrong_usage
from millstream.client.cli.options import Endpoint, Json, Key, Name, server_address
from millstream.services.errors import Code, Failure

if TYPE_CHECKING:
    from millstream.client.documents import Version

WAIT_S = 300.0
#: Narrower terminals show a percentage instead of a bar.
WIDE_COLUMNS = 72
FILE_COLUMNS = 24


def push(
    context: typer.Context,
    name: Name,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE",
            help="Model file, or a folder, zip, tar or tar.gz with a model: ONNX, or a framework's, which is imported.",
            show_default=False,
        ),
    ],
    version: Annotated[
        int | None, typer.Option("--version", metavar="N", min=1, help="Number of the new version; default: the next.")
    ] = None,
    wait: Annotated[
        bool, typer.Option(help="Wait until the version is ready, at most 5 minutes; exit with code 1 if it is not.")
    ] = True,
    activate: Annotated[bool, typer.Option(help="Serve the new version in place of the current one.")] = True,
    allow_pickle: Annotated[
        bool,
        typer.Option("--allow-pickle", help="Load a pickle, which can execute code: classes of a list, in a sandbox."),
    ] = False,
    allow_code: Annotated[
        bool,
        typer.Option("--allow-code", help="Run code that a model's folder brings with it, in a sandbox."),
    ] = False,
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            metavar="NAME:TYPE:SHAPE",
            help="An input that the file does not describe, as TorchScript does not: x:FP32:-1,3,224,224.",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(metavar="JSON|FILE", help='Model configuration, such as {"rows_max": 32, "pools": ["cpu"]}.'),
    ] = None,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Upload a model as a new version.

    A model of another framework is imported: converted, and compared with what its framework answers. The server then
    checks the file and the workers load it. Until the new version is ready the current one keeps serving, and no
    request fails. A version never changes: push again to create the next one.
    """
    server = server_address(context, endpoint, key)
    options = {
        "version": version,
        "config": _config(config),
        "activate": activate,
        "wait_s": WAIT_S if wait else 0,
        "allow_pickle": allow_pickle,
        "allow_code": allow_code,
        "inputs": inputs or [],
    }
    document = _push(server, name, file, options, quiet=json_output)
    if wait and document["state"] not in {"ready", "standby"}:
        what = f"{name} version {document['version']} is still {document['state']} after {WAIT_S:g} s"
        raise Failure(Code.EXPIRED, f"{what}: `millstream describe {name}` shows its state; has its pool a worker?")
    if json_output:
        from millstream.client.cli.terminal import emit

        emit(document)
    else:
        _show(document, server, activate=activate)


def _push(server: ServerAddress, name: str, file: Path, options: dict[str, Any], *, quiet: bool) -> Version:
    """Upload the file, and show on a terminal how far it is; `options` are those of `Client.push`."""
    from millstream.client.client import Client

    then = "checking, loading and warming up" if options["wait_s"] else "checking"
    importer = _importer(file)
    if importer is not None:
        then = f"importing a {importer} model, {then}"
    with _UploadView(file.name, then, quiet=quiet) as view, usage_of(), Client(server, retries=0) as client:
        # The client finds out itself whether it can read the file.
        return client.push(name, file, **options, progress=view.sent)


def _importer(file: Path) -> str | None:
    """Return the name of the framework that the file is imported from; None if it is served as it is."""
    from millstream.services.ingest.layout import recognise

    try:
        importer = recognise(file).importer
    except (Failure, OSError):  # the client says why
        return None
    return importer.name if importer is not None else None


class _UploadView:
    """Shows a bar while a file is sent, and a spinner while the server does what is named by `then`."""

    def __init__(self, file: str, then: str, *, quiet: bool) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn

        from millstream.client.cli.terminal import escape, notices

        console = notices()
        wide = (BarColumn(), DownloadColumn(binary_units=True)) if console.width >= WIDE_COLUMNS else ()
        self._shown = not quiet and console.is_interactive
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            *wide,
            TaskProgressColumn(),
            console=console,
            transient=True,
        )
        name = file if len(file) <= FILE_COLUMNS else f"{file[: FILE_COLUMNS - 1]}…"
        self._task = self._bar.add_task(f"sending {escape(name)}", total=None)
        self._status = console.status(then)

    def __enter__(self) -> Self:
        if self._shown:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._shown:
            self._bar.stop()
            self._status.stop()

    def sent(self, sent_bytes: int, size_bytes: int) -> None:
        """Show how much is sent; at the end, that the server works."""
        if not self._shown:
            return
        self._bar.update(self._task, completed=sent_bytes, total=size_bytes)
        if sent_bytes == size_bytes:
            self._bar.stop()
            self._status.start()


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
    from millstream.client.cli.describe import imported, show_signature
    from millstream.client.cli.terminal import escape, results, show_detail, size, state

    console = results()
    name = escape(document["model"])
    if document.get("existing"):
        console.print(f"version {document['version']} is this file already")
    console.print(
        f"[bold]{name}[/] version {document['version']}  {state(document['state'])}  "
        f"{size(document['size_bytes'])}  [dim]sha256 {document['digest'][:12]}[/]"
    )
    show_signature(console, document)
    if document["imported"] is not None:
        show_detail(console, "  imported  ", escape(imported(document["imported"])))
    for note in document["notes"]:
        show_detail(console, "  note      ", escape(note), style="yellow")
    if not (activate or document["active"]):
        console.print(f"not active: only requests that name version {document['version']} reach it")
    elif document["state"] not in {"ready", "standby"}:
        console.print(f"{document['state']}: `millstream describe {name}` shows whether it is ready")
    else:
        if document["state"] == "standby":
            console.print("on standby: its first call loads it")
            if document["reason"]:
                show_detail(console, "  why       ", escape(document["reason"]), style="yellow")
        from millstream.client.cli.inputs import calls_of

        console.print()
        for call in calls_of(server.url, document["model"], document.get("usage")):
            console.print(call, markup=False, highlight=False, soft_wrap=True)
