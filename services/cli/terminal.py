"""Formats the output of the command line: a console for results, one for notices, JSON for scripts."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from millstream.services.process.printable import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

PIPE_COLUMNS = 400
_STATES = {
    "ready": "green",
    "failed": "red",
    "warming": "yellow",
    "loading": "yellow",
    "checking": "yellow",
    "unloaded": "dim",
}


def results() -> Console:
    """Return the console for results: standard output, without line breaks unless it is a terminal."""
    from rich.console import Console

    # A pipe has no width: tables are as wide as their content.
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def notices() -> Console:
    """Return the console for progress and remarks: standard error, so that results can be piped."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def emit(document: Any) -> None:
    """Print a document as JSON, for scripts."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """Return a table without frames; the columns named in `right` are right-aligned."""
    from rich.table import Table

    result = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for column in columns:
        result.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return result


def escape(text: str) -> str:
    """Return untrusted text with brackets escaped for rich and without control characters for the terminal."""
    from rich.markup import escape as rich_escape

    return rich_escape(printable(text))


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
    if instant_s is None:
        return "-"
    seconds = max(0.0, time.time() - instant_s)  # noqa: TID251 - for people
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def duration(seconds: float) -> str:
    """Format a duration with three significant digits: 0.214 ms, 3.81 ms, 1.2 s."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"


@contextlib.contextmanager
def working(text: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Show a spinner while the block runs, on terminals only; yields a function that changes the text after `text`."""
    console = notices()
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with console.status(text) as status:
        yield lambda more: status.update(f"{text} {escape(more)}")
