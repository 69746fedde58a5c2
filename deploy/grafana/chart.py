"""What dashboards consist of: a page has rows, a row has charts, a chart has queries. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

PREFIX = "millstream"


class Shape(StrEnum):
    """How a chart is drawn."""

    NUMBER = "stat"
    LINES = "timeseries"
    HEATMAP = "heatmap"


@dataclass(frozen=True)
class Chart:
    """One panel.

    Args:
        title: at most a few words.
        about: what the numbers mean and, where the numbers can be bad, what to do.
        unit: a unit of Grafana: reqps, s, bytes, percentunit, short, …
        queries: expressions and the names of their lines.
    """

    title: str
    about: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    shape: Shape = Shape.LINES


@dataclass(frozen=True)
class Variable:
    """A list in which the reader of a page chooses label values."""

    label: str
    metric: str  # whose label values are offered


@dataclass(frozen=True)
class Page:
    """One dashboard: a file `NAME.json`, found in Grafana by the uid `millstream-NAME`."""

    name: str
    title: str
    about: str
    variables: tuple[Variable, ...]
    rows: tuple[tuple[str, tuple[Chart, ...]], ...]

    @property
    def uid(self) -> str:
        return f"{PREFIX}-{self.name}"

    @property
    def charts(self) -> tuple[Chart, ...]:
        """All charts of the page in their order."""
        return tuple(chart for _, charts in self.rows for chart in charts)
