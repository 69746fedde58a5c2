"""`millstream predict`: sends one inference request, from a file or made up, and prints the outputs."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from millstream.services.cli.failures import wrong_usage
from millstream.services.cli.options import Endpoint, Json, Key, Name, ServerAddress, Version, server_address
from millstream.services.errors import invalid

#: Longest wait for the load of a model whose load takes longer than one request may wait.
LOAD_WAIT_S_MAX = 900.0
TOO_SLOW = 429

if TYPE_CHECKING:
    from rich.console import Console

    from millstream.services.cli.example import Example
    from millstream.services.client.call import Reply
    from millstream.services.client.client import Client
    from millstream.services.client.documents import Metadata
    from millstream.services.client.infer_codec import DecodedReply, EncodedRequest
    from millstream.services.client.tensors import Array


class _Request(NamedTuple):
    """What to send. `example` None: the input of the user."""

    encoded: EncodedRequest
    example: Example | None = None


def predict(
    context: typer.Context,
    name: Name,
    source: Annotated[
        str | None,
        typer.Option(
            "--input", "-i", metavar="FILE", help="JSON, .npy or .npz file; default: standard input, as is -."
        ),
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Send made-up values that fit the signature, and print them, too.")
    ] = False,
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
    dimension. With --json the server's reply is printed unchanged; with --example, {"request", "reply"}.
    """
    if example and source is not None:
        raise wrong_usage("--example and --input exclude each other")
    if not example and source in {None, "-"} and sys.stdin.isatty():
        raise wrong_usage(
            f"nothing to send: use --input FILE, pipe JSON into `millstream predict {name}`, or try --example"
        )
    server = server_address(context, endpoint, key)
    _predict(server, name, version, None if example else source or "-", output, json_output)


def _predict(
    server: ServerAddress, name: str, version: int | None, source: str | None, output: Path | None, json_output: bool
) -> None:
    """Send one request and print the reply; `source` None: an example."""
    from millstream.services.cli.inputs import read
    from millstream.services.cli.terminal import working
    from millstream.services.client.client import Client
    from millstream.services.client.inference import decode

    content = None if source is None else read(source)
    with Client(server, retries=0) as client:
        request = _request(client.metadata(name, version), content, binary_outputs=not json_output)
        with working(f"waiting for {name}", quiet=json_output) as more:
            reply = _answer(client, name, version, request.encoded, more)
    answer = decode(reply) if output is not None or not json_output else None
    if output is not None and answer is not None:
        _save(output, answer)
    if json_output:
        _print_json(request, reply)
        return
    assert answer is not None
    if request.example is not None:
        _show_example(request.example, _url(server, name, version))
    _show(answer, output)


def _answer(
    client: Client, name: str, version: int | None, encoded: EncodedRequest, more: Callable[[str], None]
) -> Reply:
    """Send a request and return its reply. While the model is loading for longer than a request may wait, wait here."""
    from millstream.services.cli.terminal import duration, notices
    from millstream.services.client.errors import ServerError

    until = time.monotonic() + LOAD_WAIT_S_MAX
    while True:
        load_s = client.load_s(name, version) if notices().is_interactive else 0.0
        if load_s:
            more(f"(loading, about {duration(load_s)})")
        try:
            return client.infer(name, encoded, version=version)
        except ServerError as refusal:
            again_s = refusal.retry_after_s
            if refusal.status != TOO_SLOW or again_s is None or time.monotonic() + again_s > until:
                raise
            if not client.load_s(name, version):
                raise  # it is loaded: too many requests wait for it
            if notices().is_interactive:
                more(f"(loading, about {duration(again_s)})")
            else:
                notices().print(f"{refusal.message}: sent again in {duration(again_s)}", markup=False)
            time.sleep(again_s)


def _request(metadata: Metadata, content: bytes | None, *, binary_outputs: bool) -> _Request:
    """Return the request for an input; None: an example."""
    from millstream.services.cli.example import example_of
    from millstream.services.cli.inputs import request_from

    if content is not None:
        return _Request(request_from(content, metadata, binary_outputs=binary_outputs))
    example = example_of(metadata, binary_outputs=binary_outputs)
    return _Request(example.request, example)


def _url(server: ServerAddress, name: str, version: int | None) -> str:
    return f"{server.url}/v2/models/{name}" + ("" if version is None else f"/versions/{version}") + "/infer"


def _print_json(request: _Request, reply: Reply) -> None:
    if request.example is None:
        print(reply.text)
        return
    from millstream.services.cli.terminal import emit
    from millstream.services.client.inference import decode

    emit({"request": request.example.document, "reply": decode(reply).document})


def _show_example(example: Example, url: str) -> None:
    from millstream.services.cli.terminal import results

    console = results()
    if example.document is not None:
        body = shlex.quote(json.dumps(example.document, ensure_ascii=True))
        console.print(f"curl -s {url} -d {body}\n", markup=False)
        return
    console.print(f"POST {url}, with binary tensors", markup=False)
    for name, array in example.arrays.items():
        _show_array(console, name, "", array)
    console.print()


def _save(path: Path, answer: DecodedReply) -> None:
    import numpy as np

    arrays = {
        name: np.array([_bytes(element) for element in array.ravel()], bytes).reshape(array.shape)
        if array.dtype == object
        else array
        for name, array in answer.outputs.items()
    }
    try:
        with path.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
    except OSError as error:
        raise invalid(f"--output {path}: {error.strerror or error}") from error


def _show(answer: DecodedReply, saved: Path | None) -> None:
    from millstream.services.cli.terminal import escape, results

    console = results()
    document = answer.document
    console.print(f"[bold]{escape(str(document.get('model_name')))}[/] version {document.get('model_version')}")
    datatypes = {tensor["name"]: tensor["datatype"] for tensor in document["outputs"]}
    for name, array in answer.outputs.items():
        _show_array(console, name, datatypes[name], array)
    if saved is not None:
        console.print(f"\nsaved to {escape(str(saved))}")


def _show_array(console: Console, name: str, datatype: str, array: Array) -> None:
    import numpy as np

    from millstream.services.cli.terminal import escape

    console.print(f"\n[bold cyan]{escape(name)}[/]  [dim]{datatype or array.dtype} {list(array.shape)}[/]")
    if array.dtype == object:
        array = np.array([_text(element) for element in array.ravel()]).reshape(array.shape)
    with np.printoptions(precision=5, suppress=True, threshold=200, linewidth=max(30, min(console.width, 120))):
        console.print(str(array), markup=False)


def _text(element: bytes | str) -> str:
    """Return an element of a BYTES output, which is `str` in a reply with JSON tensors."""
    return element if isinstance(element, str) else element.decode(errors="backslashreplace")


def _bytes(element: bytes | str) -> bytes:
    return element.encode() if isinstance(element, str) else element
