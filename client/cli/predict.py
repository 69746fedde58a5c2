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

from millstream.client.address import ServerAddress
from millstream.client.cli.failures import wrong_usage
from millstream.client.cli.options import Endpoint, Json, Key, Name, Version, server_address

#: Longest wait for the load of a model whose load takes longer than one request may wait.
LOAD_WAIT_S_MAX = 900.0
TOO_SLOW = 429
OUTPUT_SUFFIXES = (".npz", ".csv", ".jsonl", ".parquet")

if TYPE_CHECKING:
    from millstream.client.call import Reply
    from millstream.client.cli.inputs import Content, Example
    from millstream.client.client import Client
    from millstream.client.documents import Metadata
    from millstream.client.inference import EncodedRequest


class _Request(NamedTuple):
    """What to send. `example` None: the input of the user."""

    encoded: EncodedRequest
    example: Example | None = None


def predict(
    context: typer.Context,
    name: Name,
    file: Annotated[str | None, typer.Argument(metavar="[FILE]", help="The same as --input FILE.")] = None,
    source: Annotated[
        str | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help="JSON, JSON Lines, CSV, .npy, .npz, .parquet, lines of text or an image; default: standard input, as "
            "is -.",
        ),
    ] = None,
    text: Annotated[
        list[str] | None, typer.Option("--text", "-t", metavar="TEXT", help="A text to send; repeat it for several.")
    ] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Send made-up values that fit the signature, and print them, too.")
    ] = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print the parts of the answer as they come; with --json a line for each.")
    ] = False,
    version: Version = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Also save the outputs: as .npz, or as a table in .csv, .jsonl or .parquet.",
        ),
    ] = None,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Send one inference request and print the outputs.

    The input is one of: a table (CSV with a line of names, .parquet, JSON Lines, a list of records) for a model of
    columns; texts; an image; a .npy array, a nested list or CSV without names, for a model with one input; an .npz
    file or a JSON object of arrays by input name; a v2 request ({"inputs": [...]}). A single row may omit its first
    dimension. With --json the server's reply is printed unchanged; with --example, {"request", "reply"}.
    """
    if (file is not None) + (source is not None) + bool(text) + example > 1:
        raise wrong_usage("FILE, --example, --input and --text exclude each other")
    source = file if file is not None else source
    if not example and not text and source in {None, "-"} and sys.stdin.isatty():
        raise wrong_usage(
            f"nothing to send: use --input FILE or --text TEXT, pipe JSON into `millstream predict {name}`, or try "
            "--example"
        )
    if output is not None and output.suffix not in OUTPUT_SUFFIXES:
        raise wrong_usage(f"--output {output}: the name of the file ends with one of {', '.join(OUTPUT_SUFFIXES)}")
    if stream and (example or output is not None):
        raise wrong_usage("--stream excludes --example and --output")
    server = server_address(context, endpoint, key)
    if stream:
        _stream(server, name, version, text or _read(source or "-"), json_output)
        return
    given = None if example else text or _read(source or "-")
    _predict(server, name, version, given, output, json_output)


def _read(source: str) -> Content:
    from millstream.client.cli.inputs import read

    return read(source)


def _predict(
    server: ServerAddress,
    name: str,
    version: int | None,
    given: Content | list[str] | None,
    output: Path | None,
    json_output: bool,
) -> None:
    """Send one request and print the reply; `given` None: an example."""
    from millstream.client.cli.outputs import save, show
    from millstream.client.cli.terminal import working
    from millstream.client.client import Client
    from millstream.client.inference import decode

    with Client(server, retries=0) as client:
        request = _request(client.metadata(name, version), given, binary_outputs=not json_output)
        with working(f"waiting for {name}", quiet=json_output) as more:
            reply = _answer(client, name, version, request.encoded, more)
    answer = decode(reply) if output is not None or not json_output else None
    if output is not None and answer is not None:
        save(output, answer.outputs)
    if json_output:
        _print_json(request, reply)
        return
    assert answer is not None
    if request.example is not None:
        _show_example(request.example, _url(server, name, version))
    show(answer, output)


def _stream(
    server: ServerAddress, name: str, version: int | None, given: Content | list[str], json_output: bool
) -> None:
    """Send one request, and print the parts of its answer as they come: texts behind each other, others by line."""
    from millstream.client.cli.inputs import value_of
    from millstream.client.client import Client

    is_text = False
    with Client(server, retries=0) as client:
        metadata = client.metadata(name, version)
        for part in client.stream(name, value_of(given, metadata), version=version):
            values = {output: array.tolist() for output, array in part.items()}
            only = next(iter(values.values())) if len(values) == 1 else None
            is_text = not json_output and isinstance(only, list) and all(isinstance(one, str) for one in only)
            if is_text:
                print(*(only or ()), sep="", end="", flush=True)
            else:
                print(json.dumps(values, ensure_ascii=False), flush=True)
    if is_text:
        print()


def _answer(
    client: Client, name: str, version: int | None, encoded: EncodedRequest, more: Callable[[str], None]
) -> Reply:
    """Send a request and return its reply. While the model is loading for longer than a request may wait, wait here."""
    from millstream.client.cli.terminal import duration, notices
    from millstream.client.errors import ServerError

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


def _request(metadata: Metadata, given: Content | list[str] | None, *, binary_outputs: bool) -> _Request:
    """Return the request for an input; None: an example."""
    from millstream.client.cli.inputs import example_of, request_from

    if given is not None:
        return _Request(request_from(given, metadata, binary_outputs=binary_outputs))
    example = example_of(metadata, binary_outputs=binary_outputs)
    return _Request(example.request, example)


def _url(server: ServerAddress, name: str, version: int | None) -> str:
    return f"{server.url}/v2/models/{name}" + ("" if version is None else f"/versions/{version}") + "/infer"


def _print_json(request: _Request, reply: Reply) -> None:
    if request.example is None:
        print(reply.text)
        return
    from millstream.client.cli.terminal import emit
    from millstream.client.inference import decode

    emit({"request": request.example.document, "reply": decode(reply).document})


def _show_example(example: Example, url: str) -> None:
    from millstream.client.cli.outputs import show_array
    from millstream.client.cli.terminal import results

    console = results()
    if example.document is not None:
        body = shlex.quote(json.dumps(example.document, ensure_ascii=True))
        console.print(f"curl -s {url} -d {body}\n", markup=False)
        return
    console.print(f"POST {url}, with binary tensors", markup=False)
    for name, array in example.arrays.items():
        show_array(console, name, "", array)
    console.print()
