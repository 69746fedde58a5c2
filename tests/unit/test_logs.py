"""Log lines: their form as text and JSON, and that no logged value can forge, split or flood them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from millstream.services.process.logs import (
    JSON_BYTES_MAX,
    MESSAGE_MAX,
    JsonFormatter,
    LineHandler,
    TextFormatter,
    about,
)
from millstream.services.process.request_id import REQUEST_ID
from millstream.services.supervisor.log import LINE_BYTES_MAX, Alerts, ChildLog, LogFile
from millstream.services.supervisor.own_log import LineWriter

FORGED = "x\n2026-01-01 00:00:00,000 INFO millstream.admin: forged\r\x1b[2J\u2028\u202e"

Logged = Callable[[logging.Formatter], tuple[logging.Logger, list[bytes]]]


@pytest.fixture
def logged() -> Iterator[Logged]:
    log = logging.Logger("millstream.test", logging.INFO)  # noqa: LOG001 - no other handlers, not even pytest's
    handlers: list[logging.Handler] = []

    def open_(formatter: logging.Formatter) -> tuple[logging.Logger, list[bytes]]:
        lines: list[bytes] = []
        handlers.append(LineHandler(lines.append))
        handlers[-1].setFormatter(formatter)
        log.addHandler(handlers[-1])
        return log, lines

    yield open_
    for handler in handlers:
        log.removeHandler(handler)


def document(line: bytes) -> dict[str, Any]:
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert line.isascii()
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def test_a_json_record_has_all_that_is_known(logged: Logged) -> None:
    log, lines = logged(JsonFormatter("gateway-3"))
    token = REQUEST_ID.set("id-1")
    try:
        log.warning("loaded %s", "m", extra=about("m", version=3, folder=Path("/x"), share=float("nan")))
    finally:
        REQUEST_ID.reset(token)
    log.info("plain")
    first, second = map(document, lines)
    assert first.pop("time").endswith("Z")
    assert first == {
        "level": "WARNING",
        "logger": "millstream.test",
        "message": "loaded m",
        "process": "gateway-3",
        "pid": os.getpid(),
        "request_id": "id-1",
        "model": "m",
        "fields": {"version": 3, "folder": "/x", "share": "nan"},
    }
    assert second.keys() == {"time", "level", "logger", "message", "process", "pid"}


def test_an_exception_is_a_field(logged: Logged) -> None:
    log, lines = logged(JsonFormatter("x"))
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.exception("failed")
    record = document(lines[0])
    assert record["message"] == "failed"
    assert record["exception"].startswith("Traceback (most recent call last)")
    assert "ValueError" in record["exception"]


def test_no_logged_value_begins_a_line(logged: Logged) -> None:
    logged(logging.Formatter())  # leaves its traceback in the record
    log, lines = logged(TextFormatter())
    log.info("model %s", FORGED)
    try:
        raise ValueError(FORGED)
    except ValueError:
        log.exception("failed")
    text = b"".join(lines).decode()
    assert text.isprintable() or {char for char in text if not char.isprintable()} == {"\n"}
    starts = [line for line in text.splitlines() if not line.startswith("  ")]
    assert len(starts) == 2
    assert starts[0].endswith("model " + FORGED.encode("unicode_escape").decode())


def test_text_names_the_request(logged: Logged) -> None:
    log, lines = logged(TextFormatter(iso8601=True))
    token = REQUEST_ID.set("a\nb")
    try:
        log.info("deleted")
    finally:
        REQUEST_ID.reset(token)
    assert lines[0].endswith(rb"Z INFO millstream.test: deleted (request a\nb)" + b"\n")


@pytest.mark.parametrize("character", ["x", "\U0001f600", "\x00", "\ud800"])
def test_a_line_is_bounded_whatever_is_logged(logged: Logged, character: str) -> None:
    log, lines = logged(JsonFormatter("x"))
    log.addHandler(handler := LineHandler(lines.append))
    handler.setFormatter(TextFormatter())
    huge = character * 1_000_000
    try:
        raise ValueError(huge)
    except ValueError:
        log.exception("%s", huge, extra=about(huge, **{f"f{number}": huge for number in range(100)}))
    log.removeHandler(handler)
    assert "characters left out" in document(lines[0])["message"]
    assert len(lines[0]) <= JSON_BYTES_MAX < LINE_BYTES_MAX
    assert len(lines[1].splitlines()[0]) < 12 * MESSAGE_MAX


def test_arguments_that_do_not_fit_end_nothing(logged: Logged, capsys: pytest.CaptureFixture[str]) -> None:
    log, lines = logged(JsonFormatter("x"))
    log.info("%d", "no number")
    assert lines == []
    assert "no number" in capsys.readouterr().err


DYING = """
import logging, threading, warnings
from millstream.services.process.logs import configure_logs
configure_logs("json", "p")
logging.getLogger("uvicorn.error").error("of uvicorn")
warnings.warn("of Python")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise SystemError("the end")
"""


def test_json_is_on_standard_output_with_warnings_and_uncaught_exceptions() -> None:
    done = subprocess.run([sys.executable, "-c", DYING], capture_output=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (1, b"")
    records = [document(line + b"\n") for line in done.stdout.splitlines()]
    assert records[0]["message"] == "of uvicorn"
    assert "of Python" in records[1]["message"]
    assert "ZeroDivisionError" in records[2]["exception"]
    assert records[3]["message"] == "SystemError: the end"
    assert {record["process"] for record in records} == {"p"}


@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&-", ">/dev/full 2>/dev/full"])
@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_closed_or_full_output_ends_nothing(log_format: str, redirection: str, tmp_path: Path) -> None:
    code = (
        "import logging, pathlib, sys\n"
        "from millstream.services.process.logs import configure_logs\n"
        "configure_logs(sys.argv[1], 'p')\n"
        "for _ in range(10): logging.getLogger('x').warning('y')\n"
        "pathlib.Path(sys.argv[2]).write_text('went on')\n"
    )
    mark = tmp_path / "mark"
    shell = f'exec "$@" {redirection}'
    subprocess.run(["sh", "-c", shell, "sh", sys.executable, "-c", code, log_format, mark], check=False, timeout=120)
    assert mark.read_text() == "went on"


def write_all(fd: int, line: bytes) -> None:
    with suppress(BrokenPipeError):
        while line:
            line = line[os.write(fd, line) :]


class Child:
    """The log of a child, and what was shown and forwarded of it."""

    def __init__(self, path: Path, log_format: Any, *, forward: bool, name: str = "cpu-0") -> None:
        self.path = path
        self.shown: list[str] = []
        self.forwarded: list[bytes] = []
        take = self.forwarded.append if forward else None
        self.log = ChildLog(name, LogFile(path), log_format, self.shown.append, take)

    def write(self, *lines: str) -> list[str]:
        return [self.log.write(line.encode(), 7, 0.0) for line in lines]

    def records(self) -> list[dict[str, Any]]:
        self.log.close()
        return [json.loads(line) for line in self.path.read_text().splitlines()]


OURS = '{"time": "t", "level": "ERROR", "logger": "l", "message": "gone", "process": "p", "pid": 1}'


def test_lines_of_a_child_that_are_no_json_become_json(tmp_path: Path) -> None:
    child = Child(tmp_path / "log", "json", forward=True)
    texts = child.write(OURS, "FATAL of a library", '{"time": 1}', "{" * 100_000, "[1]", "\x1b[0m")
    assert texts[:2] == ["gone", "FATAL of a library"]
    assert [(r["level"], r["process"], r["pid"]) for r in child.records()[:3]] == [
        ("ERROR", "p", 1),
        ("CRITICAL", "cpu-0", 7),
        ("INFO", "cpu-0", 7),
    ]
    assert len(child.records()) == 6
    assert b"".join(child.forwarded) == child.path.read_bytes()
    assert child.shown == []  # they are forwarded


def test_warnings_of_json_are_shown_as_text_where_they_are_not_forwarded(tmp_path: Path) -> None:
    child = Child(tmp_path / "log", "json", forward=False)
    child.write(OURS, OURS.replace("ERROR", "INFO"))
    assert child.shown == ["cpu-0: ERROR l: gone"]
    assert len(child.records()) == 2
    redis = Child(tmp_path / "redis", "json", forward=False, name="redis")
    redis.write("# WARNING Memory overcommit must be enabled")
    assert redis.shown == []
    assert redis.records()[0]["level"] == "INFO"


def test_an_indented_traceback_is_shown_whole_and_what_follows_is_not() -> None:
    alerts = Alerts()
    lines = ["x ERROR y: failed", "  Traceback (most recent call last):", "    frame", "  ValueError: x", "INFO next"]
    assert [alerts.line_to_show(line, 0.0) is not None for line in lines] == [True, True, True, True, False]


def test_a_reader_that_stalls_stalls_no_writer_and_is_told_what_it_missed() -> None:
    read_fd, write_fd = os.pipe()
    writer = LineWriter(partial(write_all, write_fd), lines_max=10)
    line = b"x" * 9999 + b"\n"
    for _ in range(100):  # more than the pipe and the queue hold
        writer.write(line)
    seen = b""
    while b"lines are only in the log files" not in seen:
        seen += os.read(read_fd, 1 << 16)
        writer.write(line)
    os.close(read_fd)  # the rest is for nobody
    writer.write(line)
    writer.close()
    os.close(write_fd)
