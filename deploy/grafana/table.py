"""Print a table of every panel with its live result: `python -m deploy.grafana.table http://127.0.0.1:9090 [RANGE]`.

RANGE is the window that takes the place of Grafana's $__rate_interval, 5m unless given.
"""

from __future__ import annotations

import json
import math
import re
import sys
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deploy.grafana.build import PAGES
from deploy.grafana.chart import Chart, Page, Shape

LINES_SHOWN_MAX = 2  # lines of a panel that a row names; the others are counted

Ask = Callable[[str], list[dict[str, Any]]]


@dataclass(frozen=True)
class Row:
    """A panel and what Prometheus said to its queries. `lines`: names and values; values are no NaN."""

    page: Page
    chart: Chart
    lines: tuple[tuple[str, float], ...]


def rows(ask: Ask, window: str = "5m") -> Iterator[Row]:
    """Yield a row for each panel. `ask` returns the series of an expression."""
    for page in PAGES:
        for chart in page.charts:
            lines = [
                (_name(legend, series["metric"]), float(series["value"][1]))
                for expression, legend in chart.queries
                for series in ask(as_sent(expression, window))
            ]
            yield Row(page, chart, tuple((name, value) for name, value in lines if not math.isnan(value)))


def as_sent(expression: str, window: str) -> str:
    """Return an expression as Grafana sends it when all values of its variables are chosen."""
    return re.sub(r"\$(model|pool)\b", ".*", expression.replace("$__rate_interval", window))


def render(found: Iterator[Row]) -> str:
    """Return the rows as a table in Markdown."""
    table = ["| dashboard | panel | what it shows | result |", "|---|---|---|---|"]
    for row in found:
        unit = "reqps" if row.chart.shape is Shape.HEATMAP else row.chart.unit  # its unit is that of the buckets
        shown = [f"{name} {_value(value, unit)}".strip() for name, value in row.lines[:LINES_SHOWN_MAX]]
        more = len(row.lines) - len(shown)
        cell = "; ".join(shown) + (f"; {more} more" if more else "") if shown else "no data"
        title = row.page.title.removeprefix("Millstream: ")
        table.append(f"| {title} | {row.chart.title} | {row.chart.about} | {cell} |")
    return "\n".join(table) + "\n"


def _name(legend: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda found: labels.get(found[1], ""), legend)


def _value(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.1%}"
    if unit in {"bytes", "Bps"}:
        power = min(4, int(math.log(value, 1024))) if value >= 1 else 0
        text = f"{value / 1024**power:.3g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
        return text + ("/s" if unit == "Bps" else "")
    if unit == "s":
        return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
    return f"{value:.3g}" + ("/s" if unit in {"reqps", "ops"} else "")


def _ask(url: str) -> Ask:
    def ask(expression: str) -> list[dict[str, Any]]:
        query = urllib.parse.urlencode({"query": expression})
        with urllib.request.urlopen(f"{url.rstrip('/')}/api/v1/query?{query}") as reply:  # noqa: S310
            result: list[dict[str, Any]] = json.load(reply)["data"]["result"]
        return result

    return ask


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.stdout.write(render(rows(_ask(sys.argv[1]), *sys.argv[2:3])))
