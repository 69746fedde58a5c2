"""How the command line looks: one console for results, one for everything else, JSON for scripts."""

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
    """The console for what was asked for: standard output, lines never broken when it is not a terminal."""
    from rich.console import Console

    # A pipe has no width: tables are as wide as what is in them.
    return Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else PIPE_COLUMNS)


def notices() -> Console:
    """The console for progress and remarks: standard error, so that results can be piped."""
    from rich.console import Console

    return Console(stderr=True, highlight=False, soft_wrap=True)


def emit(document: Any) -> None:
    """Print JSON, as a script wants it."""
    print(json.dumps(document, indent=2, ensure_ascii=False))


def table(*columns: str, right: tuple[str, ...] = ()) -> Table:
    """A table without frames: the columns' names over their values. Columns named in `right` hold numbers."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return made


def escape(text: str) -> str:
    """Text from elsewhere, so that its brackets are not taken for markup, and the terminal obeys nothing in it."""
    from rich.markup import escape as rich_escape

    return rich_escape(printable(text))


def state(name: str) -> str:
    """A version's state in its colour."""
    colour = _STATES.get(name)
    return f"[{colour}]{name}[/]" if colour else name


def size(number: float | None) -> str:
    """Bytes for people: 12.3 MiB."""
    if number is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024 or unit == "GiB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    raise AssertionError("a size always has a unit")


def ago(instant_s: float | None) -> str:
    """How long ago an instant (seconds since the epoch) was."""
    if instant_s is None:
        return "-"
    seconds = max(0.0, time.time() - instant_s)  # noqa: TID251 - for people
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def duration(seconds: float) -> str:
    """A time with three digits that matter: 0.214 ms, 3.81 ms, 1.20 s."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms"


@contextlib.contextmanager
def working(text: str, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A spinner while something takes its time, on terminals only; what it gives changes the text."""
    console = notices()
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with console.status(text) as status:
        yield lambda more: status.update(f"{text} {escape(more)}")
