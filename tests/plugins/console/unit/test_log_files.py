"""Log files as processes, models and rotation leave them: what is shown of them stays bounded, ordered and text."""

from __future__ import annotations

import json
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from millstream.plugins.console.gateway.log_files import LINES_MAX, TEXT_MAX, LogFilter, LogTail, newest, processes

ALL = LogFilter()


def line(number: int, text: str = "said", level: str = "INFO") -> str:
    return f"2026-01-31 12:{number // 60:02}:{number % 60:02},000 {level} test: {text}\n"


def texts(found: list[dict[str, Any]]) -> list[str]:
    return [one["text"].removeprefix("test: ") for one in found]


def test_lines_of_all_forms_are_ordered_by_time(tmp_path: Path) -> None:
    (tmp_path / "worker-cpu-0.log").write_text(line(2, "second") + "Traceback …\n  File …\n" + line(9, "last", "ERROR"))
    at = datetime(2026, 1, 31, 12, 0, 5).astimezone(timezone.utc).isoformat()
    document = {"time": at, "level": "WARNING", "logger": "test", "message": "fifth", "exception": "Boom"}
    (tmp_path / "gateway-0.log").write_text(json.dumps(document) + "\n")
    (tmp_path / "redis.log").write_text("12:M 31 Jan 2026 12:00:03.000 * third\n")
    found = newest(tmp_path, ALL)
    assert texts(found) == ["second\nTraceback …\n  File …", "third", "fifth\nBoom", "last"]
    assert [one["level"] for one in found] == ["INFO", "INFO", "WARNING", "ERROR"]
    assert processes(tmp_path) == ["gateway-0", "redis", "worker-cpu-0"]
    assert texts(newest(tmp_path, LogFilter(level="ERROR"))) == ["last"]
    assert texts(newest(tmp_path, LogFilter(text="TRACEBACK"))) == ["second\nTraceback …\n  File …"]
    assert texts(newest(tmp_path, LogFilter(process="redis"))) == ["third"]
    assert newest(tmp_path, LogFilter(process="../redis")) == []
    assert texts(newest(tmp_path, LogFilter(before=found[1]["at"]))) == ["second\nTraceback …\n  File …"]


@pytest.mark.parametrize(
    "hostile",
    [
        '{"a":' * 100_000,
        '{"time": "0001-01-01T00:00:00", "message": "x"}',
        '{"time": "9999-12-31T23:59:59-14:00", "message": "x"}',
        '{"time": 5, "message": "x"}',
        '{"time": [], "message": {}}',
        "{}",
        "{",
        "2026-99-99 12:00:00,000 INFO test: no day",
        "0000-01-01 00:00:00,000 INFO test: no year",
        "12:M 31 Feb 2026 12:00:03.000 * no day",
        "\x00\x1b[2J\x7f\u202e",
    ],
    ids=lambda text: str(text)[:20],
)
def test_a_line_that_is_none_of_ours_belongs_to_the_one_before(tmp_path: Path, hostile: str) -> None:
    (tmp_path / "worker-cpu-0.log").write_text(line(1, "first") + hostile + "\n" + line(2, "second"))
    found = newest(tmp_path, ALL)
    assert found[-1]["text"] == "test: second"
    assert found[-2]["text"].startswith(("test: first", "x"))
    assert all(len(one["text"]) <= TEXT_MAX for one in found)
    json.dumps(found)


def test_bytes_that_are_no_text_and_lines_without_an_end_cost_little(tmp_path: Path) -> None:
    path = tmp_path / "worker-cpu-0.log"
    path.write_bytes(line(1).encode() + b"\xff\xfe\x80" * (4 << 20) + b"\n" + line(2, "second").encode())
    found = newest(tmp_path, ALL)
    assert texts(found)[-1] == "second"
    assert sum(len(one["text"]) for one in found) <= LINES_MAX * TEXT_MAX


def test_only_the_newest_lines_are_returned(tmp_path: Path) -> None:
    (tmp_path / "a.log.1").write_text("".join(line(number, f"{number}") for number in range(LINES_MAX)))
    (tmp_path / "a.log").write_text("".join(line(number, f"{number}") for number in range(LINES_MAX, LINES_MAX + 10)))
    found = texts(newest(tmp_path, ALL))
    assert found == [str(number) for number in range(10, LINES_MAX + 10)]


def test_a_reader_follows_whole_lines_over_rotation(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text(line(1, "before"))
    tail = LogTail(tmp_path, ALL)
    assert tail.read() == []
    with path.open("a") as file:
        file.write(line(2, "first") + line(3, "se")[:-1])
    assert texts(tail.read()) == ["first"]
    with path.open("a") as file:
        file.write("cond\n")
    assert texts(tail.read()) == ["second"]
    path.rename(tmp_path / "a.log.1")
    assert tail.read() == []
    path.write_text(line(4, "new"))
    (tmp_path / "b.log").write_text(line(5, "of another process"))
    assert texts(tail.read()) == ["new", "of another process"]
    path.unlink()
    assert tail.read() == []


def test_a_reader_of_a_log_that_grows_fast_gets_the_newest_lines(tmp_path: Path) -> None:
    tail = LogTail(tmp_path, ALL)
    (tmp_path / "a.log").write_text("".join(line(number % 3600, f"{number}" + "x" * 1000) for number in range(5000)))
    found = tail.read()
    assert 0 < len(found) <= LINES_MAX
    assert texts(found)[-1].startswith("4999x")
