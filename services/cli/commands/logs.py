"""`millstream logs`: shows and follows the logs of the processes that `millstream up` runs."""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.services.cli.commands.up import Home
from millstream.services.cli.help import nearest
from millstream.services.cli.options import Json, complete_logs, local_home
from millstream.services.errors import not_found
from millstream.services.supervisor.log_names import ACCESS_SUFFIX

if TYPE_CHECKING:
    from millstream.services.cli.log_entries import Entry
    from millstream.services.cli.log_files import ProcessLog

POLL_S = 0.2
LINES_MAX = 100_000

#: programs that are no workers
_OTHERS = {"redis", "controller", "supervisor"}
_COLOURS = {"WARNING": "33", "ERROR": "31", "CRITICAL": "31"}

Wanted = Callable[[str], bool]
Matches = Callable[["Entry"], bool]


def logs(
    context: typer.Context,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="[gateway|worker|access|PROCESS|MODEL]",
            help="Show only the processes of a kind, the access logs, one process like cpu-0, the workers of a pool, "
            "or the entries that name a model; default: all but the access logs.",
            autocompletion=complete_logs,
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new entries, until Ctrl-C.")] = False,
    lines: Annotated[
        int,
        typer.Option("--lines", "-n", metavar="N", min=0, max=LINES_MAX, help="Entries to begin with, the last ones."),
    ] = 100,
    home: Home = None,
    json_output: Json = False,
) -> None:
    """Show the logs of a `millstream up`, those of all processes in order of time.

    A traceback is one entry. The logs stay when the server stops. Each process keeps at most four files of 16 MiB in
    HOME/logs; older entries are deleted. With --json each entry is one line: {"process", "text"}, and "record" where
    the server writes JSON logs.
    """
    from millstream.services.cli.log_files import ProcessLog, processes

    folder = local_home(context, home) / "logs"
    names = processes(folder)
    if not names:
        raise not_found(f"there are no logs in {folder}: start a server with `millstream up`, or set --home")
    wanted, matches = selection(what, names)
    show = _show_json if json_output else Printer(names).show
    opened = {name: ProcessLog(folder, name) for name in names if wanted(name)}
    entries = last_entries(opened.values(), matches, lines)
    show(entries)
    if lines and not entries and what:
        print(
            f"nothing is logged about {what}{nearest(what, ['gateway', 'worker', 'access', *names])}", file=sys.stderr
        )
    if follow:
        _follow(folder, opened, wanted, matches, show)


def selection(what: str | None, names: Iterable[str]) -> tuple[Wanted, Matches]:
    """Return which processes to read and which of their entries to show, for a process, a kind, a pool or a model."""
    from millstream.services.cli.log_entries import about_model

    if not what:
        return lambda name: not _is_access(name), lambda _: True
    if what == "access":
        return _is_access, lambda _: True
    if what in {"gateway", "gateways"}:
        return _is_gateway, lambda _: True
    if what in {"worker", "workers"}:
        return _is_worker, lambda _: True
    if (process := what.partition("@")[0]) in names:  # cpu-0@HOST, as lists and metrics name it, too
        return lambda name: name == process, lambda _: True
    if any(_pool(name) == what for name in names):
        return lambda name: _pool(name) == what, lambda _: True
    return lambda _: True, about_model(what)


def last_entries(logs: Iterable[ProcessLog], matches: Matches, count: int) -> list[Entry]:
    """Return the last `count` entries of all logs that match, in order of time."""
    from millstream.services.cli.log_entries import entries_backwards

    found: list[Entry] = []
    for log in logs:
        # At least one, also for none: the first line is where `new_lines` continues.
        with contextlib.closing(log.lines_backwards()) as lines:
            mine = list(itertools.islice(filter(matches, entries_backwards(log.process, lines)), max(count, 1)))
        found += reversed(mine)
    found.sort(key=lambda entry: entry.time_s)
    return found[len(found) - count :] if count < len(found) else found


def _follow(
    folder: Path,
    opened: dict[str, ProcessLog],
    wanted: Wanted,
    matches: Matches,
    show: Callable[[list[Entry]], None],
) -> None:
    """Show what is written to the logs of `opened` and of processes that start later, until Ctrl-C."""
    from millstream.services.cli.log_entries import NO_TIME, entries
    from millstream.services.cli.log_files import ProcessLog, processes

    times = dict.fromkeys(opened, NO_TIME)
    shown = dict.fromkeys(opened, True)
    try:
        while True:
            new: list[Entry] = []
            for name, log in opened.items():
                for entry in entries(name, log.new_lines(), times[name]):
                    times[name] = entry.time_s
                    # A traceback that is written in two parts belongs together.
                    shown[name] = matches(entry) or (shown[name] and entry.continued)
                    new += [entry] if shown[name] else []
            show(sorted(new, key=lambda entry: entry.time_s))
            for name in processes(folder):
                if name not in opened and wanted(name):
                    opened[name], times[name], shown[name] = ProcessLog(folder, name), NO_TIME, False
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


class Printer:
    """Prints entries, each line behind the name of its process."""

    def __init__(self, names: Iterable[str]) -> None:
        from millstream.services.cli.terminal import allows_colour

        self._width = max(map(len, names))
        self._colour = allows_colour()

    def show(self, entries: list[Entry]) -> None:
        from millstream.services.cli.log_entries import readable

        for entry in entries:
            lines = readable(entry)
            code = next((code for level, code in _COLOURS.items() if f" {level} " in lines[0][:64]), None)
            for line in lines:
                print(f"{self._styled(f'{entry.process:<{self._width}}', '36')}  {self._styled(line, code)}")
        sys.stdout.flush()

    def _styled(self, text: str, code: str | None) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._colour and code else text


def _show_json(entries: list[Entry]) -> None:
    for entry in entries:
        document: dict[str, object] = {"process": entry.process, "text": "\n".join(entry.lines)}
        if (record := entry.record) is not None:
            document["record"] = record
        print(json.dumps(document))
    sys.stdout.flush()


def _is_gateway(name: str) -> bool:
    return name.startswith("gateway-") and not _is_access(name)


def _is_access(name: str) -> bool:
    return name.endswith(ACCESS_SUFFIX)


def _is_worker(name: str) -> bool:
    return not (name.startswith("gateway-") or name in _OTHERS)


def _pool(name: str) -> str:
    return name.rpartition("-")[0]
