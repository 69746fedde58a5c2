"""Draws docs/benchmarks.svg, the README's chart, from the table of docs/benchmarks.md: ratios of rates to bare servers.

python -m tests.bench.chart (`make bench` does it after it has written the page)
"""

from __future__ import annotations

import html
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE, PLOT = ROOT / "docs/benchmarks.md", ROOT / "docs/benchmarks.svg"
#: figure of the page -> what the chart calls it; each is a rate, as a multiple of a bare server's
BARS = {
    "rate at 64 connections": "REST, JSON, 64 connections (bare uvicorn: 1)",
    "rate at 16 connections": "REST, JSON, 16 connections (bare uvicorn: 1)",
    "602 KB, rate at 8 connections": "REST, images of 602 KB (bare uvicorn: 1)",
    "gRPC, rate at 64 calls": "gRPC, 64 calls (bare grpc.aio server: 1)",
    "squeezenet, 602 KB binary input": "SqueezeNet (loop around ONNX Runtime: 1)",
}
WIDTH, ROW, LEFT, RIGHT = 760, 30, 340, 60
_FIGURE = re.compile(r"^\| ([^|]+) \| \*\*([\d.]+)\*\* \|", re.MULTILINE)


def plot_of(page: str) -> str:
    """Return the chart of a page of benchmarks. Raises KeyError if a figure is missing."""
    measured = {name: float(value) for name, value in _FIGURE.findall(page)}
    values = [(label, measured[name]) for name, label in BARS.items()]
    scale = (WIDTH - LEFT - RIGHT) / max(value for _, value in values)
    height = ROW * len(values) + 30
    one = LEFT + scale
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif">',
        "<style>text { font-size: 13px }</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for number, (label, value) in enumerate(values):
        y = number * ROW + 8
        parts += [
            f'<text x="{LEFT - 10}" y="{y + 15}" text-anchor="end" fill="#333333">{html.escape(label)}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{value * scale:.0f}" height="{ROW - 9}" fill="#2a7fb8"/>',
            f'<text x="{LEFT + value * scale + 6:.0f}" y="{y + 15}" fill="#333333">{value:.2f}</text>',
        ]
    parts.append(
        f'<line x1="{one:.0f}" x2="{one:.0f}" y1="2" y2="{height - 26}" stroke="#c0392b" stroke-dasharray="4 3"/>'
        f'<text x="{one:.0f}" y="{height - 10}" text-anchor="middle" fill="#c0392b">the bare server</text></svg>\n'
    )
    return "\n".join(parts)


def main() -> None:
    """Write the chart."""
    PLOT.write_text(plot_of(PAGE.read_text()))


if __name__ == "__main__":
    main()
