"""`millstream top`: shows what a server does now: endpoints, workers and totals, again and again."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.client.cli.failures import wrong_usage
from millstream.client.cli.options import Endpoint, Json, Key, server_address
from millstream.client.cli.terminal import emit, escape, results
from millstream.plugins.top.picture import Sort, picture, sorted_endpoints
from millstream.services.errors import Failure

if TYPE_CHECKING:
    from rich.console import Console

    from millstream.client.client import Client
    from millstream.plugins.top.rates import Overview

#: longest wait for an answer before the picture says that the server does not answer
ANSWER_S_MAX = 10.0
SVG_COLUMNS = 140


def top(
    context: typer.Context,
    interval: Annotated[
        float, typer.Option("--interval", "-i", metavar="S", min=0.1, max=3600, help="Seconds between two pictures.")
    ] = 2.0,
    sort: Annotated[
        Sort, typer.Option("--sort", metavar="COLUMN", help=f"Endpoints by {', '.join(Sort)}.")
    ] = Sort.RATE,
    once: Annotated[
        bool, typer.Option("--once", help="Print one picture of one interval; the default in a pipe.")
    ] = False,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="With --once, also write the picture to an SVG file.")
    ] = None,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Show live what a server does: requests by endpoint, workers, and totals.

    The key s sorts by the next column; q or Ctrl-C ends it.

    Rates, quantiles and busy shares are those of the last interval. FAILED/S counts requests that failed by the
    server's fault, INVALID/S by the caller's, or that were cancelled. ROWS/RUN is the mean batch. MEMORY is what a
    worker counts for its models, PROCESS all that its process takes; BUSY and PROCESS are known of the workers on the
    machine of the gateway that answers.

    It reads /metrics and the admin API, so it works with any server that answers here. An API key needs the scope
    metrics for totals and endpoints, and models:read for workers; a line says what is left out.
    """
    if svg is not None and not once:
        raise wrong_usage("--svg writes one picture: add --once")
    from millstream.client.client import Client

    console = results()
    with Client(server_address(context, endpoint, key), retries=0, timeout=ANSWER_S_MAX) as client:
        if console.is_interactive and not once and not json_output:
            _follow(client, console, interval, sort)
            return
        found = _one_interval(client, interval)
        if json_output:
            endpoints = [asdict(one) for one in sorted_endpoints(found.endpoints, sort)]
            emit({"server": client.url, **asdict(found), "endpoints": endpoints})
        else:
            console.print(picture(_title(client, interval), found, sort, console.width, None), soft_wrap=False)
        if svg is not None:
            _write_svg(svg, picture(_title(client, interval), found, sort, SVG_COLUMNS, None))


def _one_interval(client: Client, interval: float) -> Overview:
    from millstream.plugins.top.rates import overview
    from millstream.plugins.top.reading import read_server

    before = read_server(client)
    time.sleep(interval)
    return overview(before, read_server(client))


def _follow(client: Client, console: Console, interval: float, sort: Sort) -> None:
    """Show pictures until q, Ctrl-C or SIGTERM, on a screen of their own: the terminal is then as it was before.

    A server that does not answer for a while, as at a restart, is asked again; the first answer must come.
    """
    from rich.live import Live

    from millstream.plugins.top.keyboard import keyboard, unwound_by_sigterm
    from millstream.plugins.top.rates import overview
    from millstream.plugins.top.reading import read_server

    now = read_server(client)
    found, problem = overview(None, now), ""
    screen = Live(console=console, screen=True, auto_refresh=False)
    with unwound_by_sigterm(), screen as live, keyboard() as pressed:
        due = time.monotonic() + interval
        while True:
            title = f"{_title(client, interval)}, by {sort} [dim](s: next column, q: quit)[/]"
            title += f"\n[bold red]no answer: {escape(problem)}[/]" if problem else ""
            live.update(picture(title, found, sort, console.width, console.height), refresh=True)
            key = pressed(max(0.0, due - time.monotonic()))
            if key == "q":
                return
            if key == "s":
                sort = _next(sort)
            if time.monotonic() < due:
                continue
            try:
                last, now = now, read_server(client)
            except Failure as failure:
                problem = failure.message
            else:
                found, problem = overview(last, now), ""
            due = time.monotonic() + interval


def _next(sort: Sort) -> Sort:
    columns = list(Sort)
    return columns[(columns.index(sort) + 1) % len(columns)]


def _title(client: Client, interval: float) -> str:
    return f"[bold]millstream top[/]  {escape(client.url)}, every {interval:g} s"


def _write_svg(path: Path, shown: Any) -> None:
    """Write a picture as an SVG file, in colours. Raises OSError."""
    import io
    import re

    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        record=True,
        width=SVG_COLUMNS,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    console.print(shown)
    # Without rich's web fonts: a picture in a page is to load nothing from elsewhere.
    drawn = re.sub(r"\s*@font-face \{.*?\}", "", console.export_svg(title="millstream top"), flags=re.DOTALL)
    path.write_text(drawn, encoding="utf-8")
