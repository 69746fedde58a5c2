"""`millstream predict`: one inference from a file, readable."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.services.cli.options import Json, Key, Name, ServerAddress, Url, Version, endpoint
from millstream.services.errors import invalid

if TYPE_CHECKING:
    from millstream.services.cli.infer_codec import Answer


def predict(
    context: typer.Context,
    name: Name,
    source: Annotated[
        str, typer.Option("--input", "-i", metavar="FILE", help="JSON, .npy or .npz; - reads standard input.")
    ] = "-",
    version: Version = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.npz", help="Save the outputs, too.")
    ] = None,
    json_output: Json = False,
    url: Url = None,
    key: Key = None,
) -> None:
    """Send one inference request and print the outputs.

    The input is a v2 request ({"inputs": [...]}), a bare nested list for a model with one input, an object of nested
    lists by input name, a .npy array or an .npz of arrays by input name. A single row may come without its first
    dimension. With --json the endpoint's own reply is printed.
    """
    if source == "-" and sys.stdin.isatty():
        raise invalid(f"nothing to send: give --input FILE, or pipe JSON into `millstream predict {name}`")
    asyncio.run(_predict(endpoint(context, url, key), name, version, source, output, json_output))


async def _predict(
    where: ServerAddress, name: str, version: int | None, source: str, output: Path | None, json_output: bool
) -> None:
    from millstream.services.cli.client import Api
    from millstream.services.cli.infer_codec import answer_of
    from millstream.services.cli.inputs import call_from, read

    content = read(source)
    async with Api(where) as api:
        metadata = await api.metadata(name, version)
        call = call_from(content, metadata, binary_outputs=not json_output)
        reply = await api.infer(name, version, call.body, call.header_bytes)
    if output is None and json_output:
        print(reply.text)
        return
    answer = answer_of(reply.content, reply.headers.get("Inference-Header-Content-Length"))
    if output is not None:
        _save(output, answer)
    if json_output:
        print(reply.text)
    else:
        _show(answer, output)


def _save(path: Path, answer: Answer) -> None:
    import numpy as np

    arrays = {name: array.astype(bytes) if array.dtype == object else array for name, array in answer.outputs.items()}
    try:
        with path.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise invalid(f"--output {path}: {error.strerror or error}") from error


def _show(answer: Answer, saved: Path | None) -> None:
    import numpy as np

    from millstream.services.cli.terminal import escape, results

    console = results()
    document = answer.document
    console.print(f"[bold]{escape(str(document.get('model_name')))}[/] version {document.get('model_version')}")
    datatypes = {tensor["name"]: tensor["datatype"] for tensor in document["outputs"]}
    for name, array in answer.outputs.items():
        console.print(f"\n[bold cyan]{escape(name)}[/]  [dim]{datatypes[name]} {list(array.shape)}[/]")
        shown = array
        if array.dtype == object:
            shown = np.array([e.decode(errors="backslashreplace") for e in array.ravel()]).reshape(array.shape)
        with np.printoptions(precision=5, suppress=True, threshold=200, linewidth=max(40, min(console.width, 120))):
            console.print(str(shown), markup=False)
    if saved is not None:
        console.print(f"\nsaved to {escape(str(saved))}")
