"""`millstream bench`: measures the rate, latency and batch sizes of a model under load."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from millstream.client.address import ServerAddress
from millstream.client.cli.options import Endpoint, Json, Key, Name, server_address
from millstream.services.errors import Code, Failure

if TYPE_CHECKING:
    from millstream.client.cli.load_generator import LoadTotals
    from millstream.client.models import Metrics

_METRIC = "millstream_batch_rows"


def bench(
    context: typer.Context,
    name: Name,
    connections: Annotated[
        int, typer.Option("--connections", "-c", metavar="N", min=1, max=4096, help="Requests in flight at once.")
    ] = 16,
    seconds: Annotated[
        float, typer.Option("--seconds", "-s", metavar="S", min=0.1, max=3600, help="Duration of the load.")
    ] = 5.0,
    rows: Annotated[int, typer.Option("--rows", metavar="N", min=1, help="Rows of each request.")] = 1,
    json_output: Json = False,
    endpoint: Endpoint = None,
    key: Key = None,
) -> None:
    """Put load on a model, and print its rate, latency and batch sizes.

    Each connection sends random inputs as binary tensors, and sends the next request when the last one is answered.
    The sender is one Python process: above about 10,000 requests per second, or on the server's own processors, it
    influences the result.
    """
    outcome = asyncio.run(
        _bench(server_address(context, endpoint, key), name, connections, seconds, rows, quiet=json_output)
    )
    if json_output:
        from millstream.client.cli.terminal import emit

        emit(outcome)
    else:
        _show(outcome)


async def _bench(
    server: ServerAddress, name: str, connections: int, seconds: float, rows: int, *, quiet: bool
) -> dict[str, Any]:
    import numpy as np

    from millstream.client.async_client import AsyncClient
    from millstream.client.cli.load_generator import LoadTarget, LoadTotals, load
    from millstream.client.inference import random_request

    async with AsyncClient(server, retries=0) as client:
        call = random_request(await client.metadata(name), rows, np.random.default_rng(0))
        # One request first, so that an error is reported once and not for every request.
        await client.infer(name, call)
        before = _batches(await client.metrics(), name)
        totals = LoadTotals()
        path = f"/v2/models/{quote(name, safe='')}/infer"
        target = LoadTarget.of(server, path, call.body, call.header_bytes)
        progress = asyncio.create_task(_progress(totals, seconds, quiet=quiet))
        try:
            elapsed_s = await load(target, connections, seconds, totals)
        finally:
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)
        after = _batches(await client.metrics(), name)
    return _outcome(name, connections, rows, elapsed_s, totals) | {"batch_rows": _difference(before, after)}


async def _progress(totals: LoadTotals, seconds: float, *, quiet: bool) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from millstream.client.cli.terminal import notices

    console = notices()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_interactive) as bar:
        task = bar.add_task("Sending", total=seconds)
        answered = 0
        while True:
            await asyncio.sleep(0.25)
            rate, answered = (len(totals.seconds) - answered) / 0.25, len(totals.seconds)
            bar.update(task, advance=0.25, description=f"{rate:,.0f} requests/s")


def _outcome(name: str, connections: int, rows: int, elapsed_s: float, totals: LoadTotals) -> dict[str, Any]:
    import numpy as np

    answered = totals.statuses[200]
    if not answered:
        statuses = ", ".join(f"{number} x {status}" for status, number in totals.statuses.items()) or "none"
        raise Failure(Code.UNAVAILABLE, f"no request was answered with 200; status codes: {statuses}")
    p50, p95, p99 = (float(value) * 1e3 for value in np.percentile(np.asarray(totals.seconds), [50, 95, 99]))
    return {
        "model": name,
        "connections": connections,
        "rows": rows,
        "seconds": elapsed_s,
        "requests": answered,
        "rate": answered / elapsed_s,
        "rows_rate": answered * rows / elapsed_s,
        "p50_ms": p50,
        "p95_ms": p95,
        "p99_ms": p99,
        "errors": {str(status): number for status, number in sorted(totals.statuses.items()) if status != 200},
    }


def _batches(metrics: Metrics, model: str) -> dict[str, float]:
    """Return one model's histogram of batch rows: cumulative counts by upper bound, `sum` and `count`."""
    samples: dict[str, float] = {}
    for part in ("bucket", "sum", "count"):
        for sample in metrics.select(f"{_METRIC}_{part}", model=model):
            key = sample.labels.get("le", part)
            samples[key] = samples.get(key, 0.0) + sample.value
    return samples


def _difference(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    change = {key: value - before.get(key, 0.0) for key, value in after.items()}
    batches = change.pop("count", 0.0)
    total = change.pop("sum", 0.0)
    buckets, below = {}, 0.0
    for bound in sorted(change, key=float):
        buckets[bound.removesuffix(".0")] = int(change[bound] - below)
        below = change[bound]
    return {"batches": int(batches), "mean": total / batches if batches else None, "up_to": buckets}


def _show(outcome: dict[str, Any]) -> None:
    from millstream.client.cli.terminal import escape, results

    console = results()
    console.print(
        f"[bold]{escape(outcome['model'])}[/]  {outcome['connections']} connections, {outcome['rows']} "
        f"{'row' if outcome['rows'] == 1 else 'rows'} per request, {outcome['seconds']:.1f} s"
    )
    console.print(f"  rate     [bold]{outcome['rate']:,.0f}[/] requests/s, {outcome['rows_rate']:,.0f} rows/s")
    console.print(
        f"  latency  p50 {outcome['p50_ms']:.2f} ms   p95 {outcome['p95_ms']:.2f} ms   p99 {outcome['p99_ms']:.2f} ms"
    )
    batches = outcome["batch_rows"]
    if batches["batches"]:
        console.print(f"  batches  {batches['batches']:,}, {batches['mean']:.1f} rows on average")
        _show_batches(console, batches)
    for status, number in outcome["errors"].items():
        console.print(f"  [red]{number:,} requests were answered with {status}[/]")


def _show_batches(console: Any, batches: dict[str, Any]) -> None:
    most = max(batches["up_to"].values(), default=0)
    lower = 1
    for bound, number in batches["up_to"].items():
        label = f"{lower}+" if bound == "+Inf" else bound
        if number:
            bounds = label if bound == "+Inf" or int(bound) == lower else f"{lower}-{label}"
            bar = "█" * max(1, round(24 * number / most))
            console.print(f"    {bounds:>9} rows  [cyan]{bar:<24}[/] {number / batches['batches']:6.1%}")
        lower = lower if bound == "+Inf" else int(bound) + 1
