"""`millstream logs`: prints the ends of the logs of processes that `millstream up` runs, and follows them.

home/logs/<process>.log, rotated to .log.1, .2, … (services/supervisor/log.py) ─> Tail ─> lines in order of time
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, BinaryIO, NamedTuple

import typer

from millstream.client.cli.options import Json, local_home
from millstream.client.cli.terminal import allows_colour
from millstream.services.cli.commands.up import Home
from millstream.services.errors import not_found
from millstream.services.nearest_names import did_you_mean
from millstream.services.process.printable import printable
from millstream.services.supervisor.log import ACCESS_SUFFIX, ROTATED_FILES

POLL_S = 0.2
LINES_MAX = 100_000
#: read first from the end of a file, then four times as much until there are enough lines
BLOCK_BYTES = 64 << 10
#: read at once from a log that is followed
READ_BYTES = 4 << 20
_LOG = re.compile(r"(.+)\.log(?:\.\d+)?")
#: the time of a line as text or JSON; lines without one, as of a traceback, belong to the line above
_TIME = re.compile(r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?")
_TIME_CHARACTERS = 64
_COLOURS = {"WARNING": "33", "ERROR": "31", "CRITICAL": "31"}
#: programs that are no workers
_OTHERS = {"redis", "controller", "supervisor"}


class Line(NamedTuple):
    """A line of a process's log. `time`: of the line, or of the one above; lines of all processes sort by it."""

    time: str
    process: str
    text: str


def logs(
    context: typer.Context,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="gateway|worker|access|POOL|PROCESS",
            help="Only the processes of a kind, the access logs, the workers of a pool, or one process like cpu-0; "
            "default: all but the access logs.",
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new lines, until Ctrl-C.")] = False,
    lines: Annotated[
        int,
        typer.Option("--lines", "-n", metavar="N", min=0, max=LINES_MAX, help="Lines to begin with, the last ones."),
    ] = 100,
    home: Home = None,
    json_output: Json = False,
) -> None:
    """Show the logs of a `millstream up`, those of all processes in order of time.

    The logs stay when the server stops. Each process keeps at most four files of 16 MiB in HOME/logs; older lines are
    deleted. With --json each line is an object: {"process", "text"}.
    """
    folder = local_home(context, home) / "logs"
    names = processes(folder)
    if not names:
        raise not_found(f"there are no logs in {folder}: start a server with `millstream up`, or set --home")
    wanted = selection(what)
    tails = {name: Tail(folder, name) for name in names if wanted(name)}
    if what and not tails:
        near = did_you_mean(what, ["gateway", "worker", "access", *names])
        raise not_found(f"no process {what[:64]!r} has a log in {folder}{near}")
    show = _printer(names, json_output=json_output)
    found = sorted((line for tail in tails.values() for line in tail.last(lines)), key=lambda line: line.time)
    try:
        show(found[max(0, len(found) - lines) :])
        if follow:
            _follow(folder, tails, wanted, show)
    finally:
        for tail in tails.values():
            tail.close()


def processes(folder: Path) -> list[str]:
    """Return the names of the processes that have a log in a folder, sorted. Raises OSError if it cannot be read."""
    try:
        names = os.listdir(folder)  # noqa: PTH208 - names are all that is needed
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted({match[1] for name in names if (match := _LOG.fullmatch(name))})


def selection(what: str | None) -> Callable[[str], bool]:
    """Return which processes are shown for a kind, a pool or a process."""
    process = (what or "").partition("@")[0]  # cpu-0@HOST, as lists and metrics name it, too

    def wanted(name: str) -> bool:
        kind, _, number = name.rpartition("-")
        if name.endswith(ACCESS_SUFFIX):
            return process in {"access", name}
        worker = kind != "gateway" and name not in _OTHERS
        return process in {"", name} or (process == "worker" and worker) or (number.isdecimal() and process == kind)

    return wanted


class Tail:
    """The log of one process: first its last lines, then what is written to it, also over rotations.

    Args:
        folder: of the log files.
        process: its name, that of the files.
    """

    def __init__(self, folder: Path, process: str) -> None:
        self._process = process
        self._path = folder / f"{process}.log"
        self._file: BinaryIO | None = None
        self._rest = b""  # a line whose end is not written yet
        self._time = ""  # of the last line

    def last(self, count: int) -> list[Line]:
        """Return the last lines, at least `count` if there are as many; `new` continues behind them."""
        content, seen = b"", set[int]()
        for suffix in ("", *(f".{number}" for number in range(1, ROTATED_FILES + 1))):
            try:
                file = open(f"{self._path}{suffix}", "rb")  # noqa: SIM115 - the first one stays open
            except FileNotFoundError:
                continue
            status = os.fstat(file.fileno())
            if status.st_ino not in seen:  # else it was rotated meanwhile
                seen.add(status.st_ino)
                content = _end_of(file, status.st_size, count - content.count(b"\n")) + content
            if suffix:
                file.close()
            else:
                self._file = file
            if content.count(b"\n") > count:
                break
        lines = list(self._lines(content))
        return lines[max(0, len(lines) - count) :]

    def new(self) -> list[Line]:
        """Return the lines that were written since the last call."""
        if self._file is None and not self._open():
            return []
        assert self._file is not None
        rotated = self._was_replaced()  # asked before reading: what was written before the rotation is read
        if os.fstat(self._file.fileno()).st_size < self._file.tell():
            self._file.seek(0)  # the file was emptied
            self._rest = b""
        content = self._file.read(READ_BYTES)
        if rotated and not content:
            self.close()
            return self.new()
        return list(self._lines(content))

    def close(self) -> None:
        """Close the file; the next call of `new` begins with the first line of the current one."""
        if self._file is not None:
            self._file.close()
        self._file = None

    def _open(self) -> bool:
        try:
            self._file = self._path.open("rb")
        except FileNotFoundError:
            return False
        return True

    def _was_replaced(self) -> bool:
        assert self._file is not None
        try:
            return self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return False

    def _lines(self, content: bytes) -> Iterator[Line]:
        *whole, self._rest = (self._rest + content).split(b"\n")
        for line in whole:
            text = line.decode(errors="replace").rstrip("\r")
            if (found := _TIME.search(text, 0, _TIME_CHARACTERS)) is not None:
                self._time = found[0].replace("T", " ").replace(",", ".")
            yield Line(self._time, self._process, text)


def _end_of(file: BinaryIO, size: int, count: int) -> bytes:
    """Return the end of a file, with at least `count` whole lines if it has as many."""
    length = BLOCK_BYTES
    while True:
        file.seek(max(0, size - length))
        content = file.read(min(size, length))
        if length >= size or content.count(b"\n") > count:
            return content
        length *= 4


def _follow(
    folder: Path, tails: dict[str, Tail], wanted: Callable[[str], bool], show: Callable[[Iterable[Line]], None]
) -> None:
    """Show what is written to the logs of `tails` and of processes that start later, until Ctrl-C."""
    try:
        while True:
            show(sorted((line for tail in tails.values() for line in tail.new()), key=lambda line: line.time))
            tails |= {name: Tail(folder, name) for name in processes(folder) if wanted(name) and name not in tails}
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _printer(names: Iterable[str], *, json_output: bool) -> Callable[[Iterable[Line]], None]:
    """Return what prints lines, each behind the name of its process."""
    width, colour = max(map(len, names)), allows_colour()

    def styled(text: str, code: str | None) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if colour and code else text

    def show(lines: Iterable[Line]) -> None:
        for _, process, text in lines:
            if json_output:
                print(json.dumps({"process": process, "text": text}))
                continue
            code = next((code for level, code in _COLOURS.items() if level in text[:_TIME_CHARACTERS]), None)
            said = printable(text.replace("\t", "    "))
            print(f"{styled(f'{process:<{width}}', '36')}  {styled(said, code)}")
        sys.stdout.flush()

    return show
