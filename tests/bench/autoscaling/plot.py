"""Draws misses of the target against worker-hours, one panel for each trace, as SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

WIDTH, HEIGHT, LEFT, TOP = 360, 260, 56, 40
COLOURS = {"Millstream": "#1a7f37", "Knative": "#bc4c00", "Ray Serve": "#8250df", "HPA on CPU": "#6e7781"}
MISSED_MIN, MISSED_MAX = 1e-4, 1.0  # less is drawn at the lower end


class Point(NamedTuple):
    """One variant of a rule on one trace."""

    trace: str
    rule: str
    setting: str
    worker_hours: float
    missed: float


def plot(points: Sequence[Point]) -> str:
    """Return the drawing."""
    traces = list(dict.fromkeys(point.trace for point in points))
    rows = math.ceil(len(traces) / 2)
    width, height = 2 * WIDTH, rows * HEIGHT + 40
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-size="11">',
        "<style>text { font-family: sans-serif }</style>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for number, (rule, colour) in enumerate(COLOURS.items()):
        x = LEFT + number * 150
        parts.append(f'<circle cx="{x}" cy="16" r="4" fill="{colour}"/><text x="{x + 9}" y="20">{escape(rule)}</text>')
    for number, trace in enumerate(traces):
        of_trace = [point for point in points if point.trace == trace]
        parts += _panel(trace, of_trace, number % 2 * WIDTH, 30 + number // 2 * HEIGHT)
    return "\n".join([*parts, "</svg>", ""])


def _panel(trace: str, points: Sequence[Point], x0: int, y0: int) -> list[str]:
    wide, high = WIDTH - LEFT - 20, HEIGHT - TOP - 36
    most = max(point.worker_hours for point in points) * 1.05
    left, top = x0 + LEFT, y0 + TOP - 16
    parts = [
        f'<text x="{left}" y="{top - 8}" font-weight="bold">{escape(trace)}</text>',
        f'<rect x="{left}" y="{top}" width="{wide}" height="{high}" fill="none" stroke="#d0d7de"/>',
        f'<text x="{left + wide / 2}" y="{top + high + 28}" text-anchor="middle">worker-hours</text>',
    ]
    for share in (1.0, 0.1, 0.01, 0.001, 0.0001):
        y = top + high * _missed_at(share)
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{share:.2%}</text>')
        parts.append(f'<line x1="{left}" x2="{left + wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="#eaeef2"/>')
    for part in (0, 0.5, 1):
        x = left + wide * part
        parts.append(f'<text x="{x:.1f}" y="{top + high + 14}" text-anchor="middle">{most * part:.0f}</text>')
    for point in points:
        x, y = left + wide * point.worker_hours / most, top + high * _missed_at(point.missed)
        title = f"{point.rule}, {point.setting}: {point.missed:.2%} missed, {point.worker_hours:.0f} worker-hours"
        parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[point.rule]}" fill-opacity="0.8">'
            f"<title>{escape(title)}</title></circle>"
        )
    return parts


def _missed_at(share: float) -> float:
    """Return the height of a share on a logarithmic axis, 0 at the top."""
    share = min(max(share, MISSED_MIN), MISSED_MAX)
    return math.log10(share / MISSED_MAX) / math.log10(MISSED_MIN / MISSED_MAX)
