"""A race report as SVG: latency of each candidate against its accuracy, the Pareto front marked. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from millstream.plugins.compile.race.report import RaceReport

_LEFT, _TOP, _WIDTH, _HEIGHT = 70, 20, 520, 300
_LOSS_MIN = 1e-7  # a smaller loss of accuracy is drawn as this one: the axis is logarithmic
_COLOURS = {"won": "#1a7f37", "lost": "#6e7781", "inaccurate": "#cf222e"}
_BASELINE_COLOUR = "#0969da"
_FRONT_COLOUR = "#bf8700"
_LABEL_CHARACTERS_MAX = 40


class Point(NamedTuple):
    """A candidate in the plot.

    Args:
        latency: of the baseline's.
        loss: 1 - least cosine.
    """

    name: str
    latency: float
    loss: float
    colour: str


def points_of(report: RaceReport) -> list[Point]:
    """Return the baseline and every candidate that was measured and judged."""
    points = [Point(report.baseline, 1.0, _LOSS_MIN, _BASELINE_COLOUR)]
    for row in report.rows:
        if row.ratio and row.cosine_min is not None:
            loss = min(1.0, max(_LOSS_MIN, 1 - row.cosine_min))
            points.append(Point(row.candidate, 1 / row.ratio, loss, _COLOURS.get(row.verdict, "#6e7781")))
    return points


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """Return the points that no other beats in latency without more loss, the fastest first."""
    front: list[Point] = []
    for point in sorted(points, key=lambda one: (one.latency, one.loss)):
        if not front or point.loss < front[-1].loss:
            front.append(point)
    return front


def plot_of(report: RaceReport) -> str:
    """Return the SVG document."""
    points = points_of(report)
    low = math.floor(math.log2(min(point.latency for point in points)))
    high = max(low + 1, math.ceil(math.log2(max(point.latency for point in points))))

    def x_of(latency: float) -> float:
        return _LEFT + _WIDTH * (math.log2(latency) - low) / (high - low)

    def y_of(loss: float) -> float:
        return _TOP + _HEIGHT * (math.log10(loss) - math.log10(_LOSS_MIN)) / -math.log10(_LOSS_MIN)

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 660 380" font-family="sans-serif" font-size="11">',
        '<rect width="660" height="380" fill="white"/>',
    ]
    for power in range(low, high + 1):
        x = x_of(2.0**power)
        parts.append(f'<line x1="{x:.0f}" y1="{_TOP}" x2="{x:.0f}" y2="{_TOP + _HEIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{x:.0f}" y="{_TOP + _HEIGHT + 16}" text-anchor="middle">{2.0**power:g}</text>')
    for power in range(round(math.log10(_LOSS_MIN)), 1):
        y = y_of(10.0**power)
        parts.append(f'<line x1="{_LEFT}" y1="{y:.0f}" x2="{_LEFT + _WIDTH}" y2="{y:.0f}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">1e{power}</text>')
    front = pareto_front(points)
    line = " ".join(f"{x_of(point.latency):.1f},{y_of(point.loss):.1f}" for point in front)
    parts.append(f'<polyline points="{line}" fill="none" stroke="{_FRONT_COLOUR}" stroke-dasharray="4 3"/>')
    for point in points:
        x, y = x_of(point.latency), y_of(point.loss)
        ring = f' stroke="{_FRONT_COLOUR}" stroke-width="3"' if point in front else ""
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{point.colour}"{ring}/>')
        anchor, shift = ("end", -9) if x > _LEFT + _WIDTH / 2 else ("start", 9)
        name = escape(point.name[:_LABEL_CHARACTERS_MAX])
        parts.append(f'<text x="{x + shift:.1f}" y="{y + 4:.1f}" text-anchor="{anchor}">{name}</text>')
    parts.append(
        f'<text x="{_LEFT + _WIDTH / 2}" y="356" text-anchor="middle">latency, as a multiple of the baseline\'s '
        "(left is faster)</text>"
    )
    parts.append(
        f'<text x="{_LEFT + _WIDTH / 2}" y="372" text-anchor="middle">vertical: 1 - least cosine (up is more '
        "accurate); rings and dashes: Pareto front; red: refused by the gate</text></svg>"
    )
    return "\n".join(parts) + "\n"
