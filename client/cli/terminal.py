"""Formats the output of the command line: a console for results, one for notices, JSON for scripts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from millstream.services.process.printable import printable

if TYPE_CHECKING:
    from rich.console import Console

PIPE_COLUMNS = 400
GAP_COLUMNS = 3
#: Narrower texts are not wrapped: the terminal does it.
TEXT_COLUMNS_MIN = 16
#: shares of a bar from which it is shown in yellow and in red
BAR_YELLOW, BAR_RED = 0.75, 0.9
#: rich drops a backslash before a bracket also where it begins no tag, and does not escape that
_ESCAPED_NO_TAG = re.compile(r"\\\[(?![a-z#/@][^[]*?\])")
_STATES = {
    "ready": "green",
    "standby": "cyan",
    "failed": "red",
    "warming": "yellow",
    "loading": "yellow",
    "checking": "yellow",
    "unloaded": "dim",
}


def prepare_streams() -> None:
    """Make standard output and error usable in any state in which they were inherited.

    Closed: what is written is dropped. Not UTF-8: what cannot be encoded is written as an escape.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the rest of the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def allows_colour(stream: TextIO | None = None) -> bool:
    """Return whether a stream (default: standard output) is a terminal with colours, and NO_COLOR does not forbid them.

    Source: https://no-color.org.
    """
    environment = os.environ  # noqa: TID251 - conventions of terminals, not settings
    dumb = environment.get("TERM", "dumb") in {"dumb", "unknown", ""}
    return (stream or sys.stdout).isatty() and not dumb and not environment.get("NO_COLOR")


def output_columns() -> int:
    """Return the width of standard output; 80 for a pipe."""
    return max(20, shutil.get_terminal_size((80, 24)).columns) if sys.stdout.isatty() else 80


def results(stream: TextIO | None = None) -> Console:
    """Return the console for results: standard output, without line breaks unless it is a terminal.

    `stream`: stands for standard output; None: that itself.
    """
    # A pipe has no width: tables are as wide as their content.
    return _console(stream or sys.stdout, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def notices() -> Console:
    """Return the console for progress and remarks: standard error, so that results can be piped."""
    return _console(sys.stderr)


def _console(stream: TextIO, width: int | None = None) -> Console:
    from rich.console import Console

    return Console(
        file=stream,
        width=width,
        color_system="auto" if allows_colour(stream) else None,
        force_terminal=stream.isatty(),
        highlight=False,
        soft_wrap=True,
    )


def rate(per_s: float | None) -> str:
    """Format a rate with three digits: 0, 0.25, 12.3, 1,230; "-" for None."""
    if per_s is None:
        return "-"
    if per_s >= 100:
        return f"{per_s:,.0f}"
    return f"{per_s:.3g}"


def emit(document: Any) -> None:
    """Print a document as JSON, for scripts."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def show_rows(
    console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()
) -> None:
    """Print rows of cells with markup as a table without frames; where it is too wide, as a block of lines for each.

    Args:
        console: where to print.
        columns: the titles. The first column names what the row is about; rows in a row that repeat it leave it out.
        rows: the cells of each row.
        right: titles of the columns that are right-aligned.
    """
    from rich.text import Text

    cells = [[Text.from_markup(cell) for cell in row] for row in rows]
    widths = [max([len(title), *(row[at].cell_len for row in cells)]) for at, title in enumerate(columns)]
    if sum(widths) + GAP_COLUMNS * (len(columns) - 1) > console.width:
        _show_blocks(console, columns, cells)
        return
    _show_line(console, [Text(title, "bold") for title in columns], columns, widths, right)
    name = None
    for row in cells:
        repeated, name = row[0].plain == name, row[0].plain
        _show_line(console, [Text() if repeated else row[0], *row[1:]], columns, widths, right)


def _show_line(
    console: Console, cells: Sequence[Any], columns: Sequence[str], widths: Sequence[int], right: Sequence[str]
) -> None:
    from rich.text import Text

    aligned = []
    for cell, title, width in zip(cells, columns, widths, strict=True):
        space = " " * (width - cell.cell_len)
        aligned.append(Text(space) + cell if title in right else cell + Text(space))
    line = Text(" " * GAP_COLUMNS).join(aligned)
    line.rstrip()
    console.print(line)


def _show_blocks(console: Console, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    width = max(len(title) for title in columns[1:])
    for number, row in enumerate(rows):
        if number:
            console.print()
        console.print(row[0], style="bold")
        for title, cell in zip(columns[1:], row[1:], strict=True):
            if cell.plain not in {"", "-"}:
                console.print(f"  [dim]{title.lower():<{width}}[/]  ", cell, sep="")


def show_detail(console: Console, label: str, text: str, *, style: str = "") -> None:
    """Print text with markup behind a label; further lines of a terminal begin below the text, not below the label."""
    from rich.text import Text

    written = Text.from_markup(text)
    width = console.width - len(label)
    wraps = console.is_terminal and width >= TEXT_COLUMNS_MIN
    lines = list(written.wrap(console, width)) if wraps else [written]
    for number, line in enumerate(lines):
        line.rstrip()
        console.print(Text(label if number == 0 else " " * len(label), style) + line)


def escape(text: str) -> str:
    """Return untrusted text with brackets escaped for rich and without control characters for the terminal."""
    from rich.markup import escape as rich_escape

    return rich_escape(_ESCAPED_NO_TAG.sub(r"\\\\[", printable(text)))


def labels_text(labels: Mapping[str, str]) -> str:
    """Return the labels of a model on one line: stage=prod, team=a."""
    return ", ".join(f"{name}={value}" for name, value in sorted(labels.items()))


def state(name: str) -> str:
    """Return a version's state with markup for its colour."""
    colour = _STATES.get(name)
    return f"[{colour}]{name}[/]" if colour else name


def size(number: float | None) -> str:
    """Format a number of bytes: 12.3 MiB; "-" for None."""
    if number is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("a size always has a unit")


def ago(instant_s: float | None) -> str:
    """Format the age of an instant (seconds since the epoch): 5 min ago; "-" for None."""
    return "-" if instant_s is None else age(max(0.0, time.time() - instant_s))  # noqa: TID251 - for people


def age(seconds: float) -> str:
    """Format how long ago something was: 5 min ago."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def bar(share: float, columns: int) -> str:
    """Return a bar of this many columns with markup; `share` of it, from 0 to 1, is filled."""
    filled = round(min(1.0, max(0.0, share)) * columns)
    colour = "green" if share < BAR_YELLOW else "yellow" if share < BAR_RED else "red"
    full, empty = ("█", "░") if "utf" in (sys.stdout.encoding or "").lower() else ("#", "-")
    return f"[{colour}]{full * filled}[/][dim]{empty * (columns - filled)}[/]"


def duration(seconds: float) -> str:
    """Format a duration with three significant digits: 0.214 ms, 3.81 ms, 1.2 s."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"


@contextlib.contextmanager
def working(text: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show a spinner while the block runs, on terminals only; yields a function that changes the text after `text`."""
    console = notices()
    if quiet or not console.is_interactive:
        yield lambda _: None
        return
    with console.status(text) as status:
        yield lambda more: status.update(f"{text} {escape(more)}")
