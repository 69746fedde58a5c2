"""An overview -> what `millstream top` prints: a line of totals, and a table each of endpoints and workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

from millstream.client.cli.terminal import bar, duration, escape, rate, size
from millstream.plugins.top.rates import EndpointRates, Overview, Totals, WorkerRates

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

#: Lines that are no rows: the server, totals and, of each table, an empty line, the titles, and the number left out
_LINES_OTHER = 8
#: Each table has at least this many rows, also in a low terminal.
_ROWS_MIN = 3
_BAR_COLUMNS = 10
#: Narrower terminals have no bars.
_BAR_TERMINAL_COLUMNS = 100
#: Narrower ones have few columns.
_NARROW_COLUMNS = 80
_WORKER_COLUMNS = ("WORKER", "POOL", "DEVICE", "BUSY", "MEMORY", "PROCESS", "VERSIONS")


class Sort(StrEnum):
    """By what endpoints are sorted: the largest first, names from A to Z."""

    RATE = "rate"
    FAILED = "failed"
    INVALID = "invalid"
    P50 = "p50"
    P99 = "p99"
    ROWS = "rows"
    QUEUE = "queue"
    INSTANCES = "instances"
    NAME = "name"


_VALUE: dict[Sort, Callable[[EndpointRates], float | None]] = {
    Sort.RATE: lambda one: one.requests_per_s,
    Sort.FAILED: lambda one: one.failed_per_s,
    Sort.INVALID: lambda one: one.invalid_per_s,
    Sort.P50: lambda one: one.p50_s,
    Sort.P99: lambda one: one.p99_s,
    Sort.ROWS: lambda one: one.batch_rows,
    Sort.QUEUE: lambda one: one.queue_rows,
    Sort.INSTANCES: lambda one: one.instances,
    Sort.NAME: lambda _: 0.0,
}


def sorted_endpoints(endpoints: Sequence[EndpointRates], by: Sort) -> list[EndpointRates]:
    """Return the endpoints with the largest value first; those that have none last, equal ones by name."""
    value = _VALUE[by]
    return sorted(endpoints, key=lambda one: (-(value(one) or 0.0), one.model, _number(one.version)))


def _number(version: str) -> int:
    return int(version) if version.isdecimal() else 0


def rows_max(height: int, found: Overview) -> tuple[int, int]:
    """Return how many endpoints and workers fit a terminal; what one table does not need, the other gets."""
    room = max(2 * _ROWS_MIN, height - _LINES_OTHER)
    workers = min(len(found.workers), max(_ROWS_MIN, room - len(found.endpoints), room // 2))
    return max(_ROWS_MIN, room - workers), workers


def picture(title: str, found: Overview, by: Sort, columns: int, height: int | None) -> Group:
    """Return the picture of an overview.

    Args:
        title: what stands in the first line: the server.
        found: what to show.
        by: how endpoints are sorted.
        columns: width of the terminal.
        height: of the terminal; None: all rows are shown.
    """
    from rich.console import Group
    from rich.text import Text

    totals = Text(f"requests are not shown: {found.no_series}", "yellow")
    if not found.no_series:
        totals = Text.from_markup(_totals(found.totals))
    heading = Text.from_markup(title)
    for text in (heading, totals):  # consoles of the command line cut lines of a live picture that do not wrap
        text.no_wrap, text.overflow = False, "fold"
    lines: list[Text | Table] = [heading, totals, Text()]
    shown = (len(found.endpoints), len(found.workers))
    if height is not None:
        shown = rows_max(height - totals.cell_len // columns - title.count("\n"), found)
    endpoints = sorted_endpoints(found.endpoints, by)[: shown[0]]
    workers = found.workers[: shown[1]]
    if endpoints:
        lines += [_endpoints(endpoints, narrow=columns < _NARROW_COLUMNS)]
        lines += _rest(len(found.endpoints) - len(endpoints))
    elif not found.no_series:
        lines.append(Text("no model is loaded or called: `millstream push NAME FILE` uploads one", "yellow"))
    lines.append(Text())
    if workers:
        lines += [_workers(workers, columns), *_rest(len(found.workers) - len(workers))]
    elif found.no_workers:
        lines.append(Text(f"workers are not shown: {found.no_workers}", "yellow"))
    else:
        lines.append(Text("no worker is running", "yellow"))
    return Group(*lines)


def _rest(count: int) -> list[Text]:
    from rich.text import Text

    return [Text(f"and {count} more", "dim")] if count > 0 else []


def _totals(totals: Totals) -> str:
    parts = [
        f"[bold]{rate(totals.requests_per_s)}[/] requests/s",
        _marked(totals.failed_per_s, "failed/s"),
        f"{rate(totals.invalid_per_s)} invalid/s",
        _marked(totals.refused_per_s, "refused/s"),
        f"p50 {_seconds(totals.p50_s)}, p99 {_seconds(totals.p99_s)}",
        f"{totals.in_flight} in flight",
        f"{totals.queue_rows} rows queued",
        _gateways(totals),
        f"Redis {size(totals.redis_memory_bytes)}",
    ]
    return "  ".join(parts)


def _gateways(totals: Totals) -> str:
    noun = "gateway" if totals.gateways == 1 else "gateways"
    if totals.gateways_ready == totals.gateways:
        return f"{totals.gateways} {noun}"
    return f"[red]{totals.gateways_ready} of {totals.gateways} {noun} ready[/]"


def _marked(per_s: float | None, what: str) -> str:
    return f"[red]{rate(per_s)} {what}[/]" if per_s else f"{rate(per_s)} {what}"


def _table(columns: Sequence[str], left: Sequence[str], rows: Sequence[dict[str, str]], *, narrow: bool) -> Table:
    from rich.table import Table

    gap = 1 if narrow else 3
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="bold")
    for title in columns:
        table.add_column(title, justify="left" if title in left else "right", no_wrap=True, overflow="ellipsis")
    for row in rows:
        table.add_row(*(row[title] for title in columns))
    return table


def _endpoints(endpoints: Sequence[EndpointRates], *, narrow: bool) -> Table:
    rows = [
        {
            "MODEL": escape(one.model),
            "VERSION": escape(one.version),
            "REQ/S": rate(one.requests_per_s),
            "FAILED/S": f"[red]{rate(one.failed_per_s)}[/]" if one.failed_per_s else rate(one.failed_per_s),
            "INVALID/S": f"[yellow]{rate(one.invalid_per_s)}[/]" if one.invalid_per_s else rate(one.invalid_per_s),
            "P50": _seconds(one.p50_s),
            "P99": _seconds(one.p99_s),
            "ROWS/RUN": "-" if one.batch_rows is None else f"{one.batch_rows:.1f}",
            "QUEUE": f"[yellow]{one.queue_rows}[/]" if one.queue_rows else "0",
            "INSTANCES": str(one.instances) if one.instances else "[yellow]0[/]",
        }
        for one in endpoints
    ]
    columns = ("MODEL", "VERSION", "REQ/S", "FAILED/S", "INVALID/S", "P50", "P99", "ROWS/RUN", "QUEUE", "INSTANCES")
    shown = ("MODEL", "REQ/S", "P99", "QUEUE") if narrow else columns
    return _table(shown, ("MODEL",), rows, narrow=narrow)


def _workers(workers: Sequence[WorkerRates], columns: int) -> Table:
    bars, narrow = columns >= _BAR_TERMINAL_COLUMNS, columns < _NARROW_COLUMNS
    rows = [
        {
            "WORKER": escape(one.worker) + (" [yellow]draining[/]" if one.draining else ""),
            "POOL": escape(one.pool),
            "DEVICE": escape(one.device),
            "BUSY": _share(one.busy, bars=bars),
            "MEMORY": _memory(one, bars=bars),
            "PROCESS": size(one.resident_bytes),
            "VERSIONS": str(one.instances),
        }
        for one in workers
    ]
    shown = ("WORKER", "BUSY", "PROCESS") if narrow else _WORKER_COLUMNS
    return _table(shown, ("WORKER", "POOL", "DEVICE"), rows, narrow=narrow)


def _share(share: float | None, *, bars: bool) -> str:
    if share is None:
        return "-"
    return f"{bar(share, _BAR_COLUMNS)} {share:4.0%}" if bars else f"{share:.0%}"


def _memory(one: WorkerRates, *, bars: bool) -> str:
    if not one.memory_budget_bytes:
        return size(one.memory_used_bytes)
    text = f"{size(one.memory_used_bytes)} of {size(one.memory_budget_bytes)}"
    return f"{bar(one.memory_used_bytes / one.memory_budget_bytes, _BAR_COLUMNS)} {text}" if bars else text


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)
