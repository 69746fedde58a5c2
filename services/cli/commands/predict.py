"""`millstream predict`: sends one inference request from a file, and prints the outputs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.services.cli.failures import wrong_usage
from millstream.services.cli.options import Endpoint, Json, Key, Name, ServerAddress, Version, server_address
from millstream.services.errors import invalid

if TYPE_CHECKING:
    from millstream.services.client.infer_codec import DecodedReply


def predict(
    context: typer.Context,
    name: Name,
    source: Annotated[
        str, typer.Option("--input", "-i", metavar="FILE", help="JSON, .npy or .npz file; - reads standard input.")
    ] = "-",
    version: Version = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.npz", help="Also save the outputs to this file.")
    ] = None,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Send one inference request and print the outputs.

    The input is one of: a v2 request ({"inputs": [...]}); a nested list, for a model with one input; a JSON object of
    nested lists by input name; a .npy array; an .npz file of arrays by input name. A single row may omit its first
    dimension. With --json the server's reply is printed unchanged.
    """
    if source == "-" and sys.stdin.isatty():
        raise wrong_usage(f"nothing to send: use --input FILE, or pipe JSON into `millstream predict {name}`")
    _predict(server_address(context, endpoint, key), name, version, source, output, json_output)


def _predict(
    server: ServerAddress, name: str, version: int | None, source: str, output: Path | None, json_output: bool
) -> None:
    from millstream.services.cli.inputs import read, request_from
    from millstream.services.client.client import Client
    from millstream.services.client.inference import decode

    content = read(source)
    with Client(server, retries=0) as client:
        request = request_from(content, client.metadata(name, version), binary_outputs=not json_output)
        reply = client.infer(name, request, version=version)
    if output is None and json_output:
        print(reply.text)
        return
    answer = decode(reply)
    if output is not None:
        _save(output, answer)
    if json_output:
        print(reply.text)
    else:
        _show(answer, output)


def _save(path: Path, answer: DecodedReply) -> None:
    import numpy as np

    arrays = {name: array.astype(bytes) if array.dtype == object else array for name, array in answer.outputs.items()}
    try:
        with path.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise invalid(f"--output {path}: {error.strerror or error}") from error


def _show(answer: DecodedReply, saved: Path | None) -> None:
    import numpy as np

    from millstream.services.cli.terminal import escape, results

    console = results()
    document = answer.document
    console.print(f"[bold]{escape(str(document.get('model_name')))}[/] version {document.get('model_version')}")
    datatypes = {tensor["name"]: tensor["datatype"] for tensor in document["outputs"]}
    for name, array in answer.outputs.items():
        console.print(f"\n[bold cyan]{escape(name)}[/]  [dim]{datatypes[name]} {list(array.shape)}[/]")
        if array.dtype == object:
            array = np.array([e.decode(errors="backslashreplace") for e in array.ravel()]).reshape(array.shape)
        with np.printoptions(precision=5, suppress=True, threshold=200, linewidth=max(40, min(console.width, 120))):
            console.print(str(array), markup=False)
    if saved is not None:
        console.print(f"\nsaved to {escape(str(saved))}")
