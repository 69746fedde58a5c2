"""`millstream logs`: entries of all forms of lines, files read from their ends, rotation while they are followed."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.services.cli import log_files
from millstream.services.cli.commands.logs import last_entries, selection
from millstream.services.cli.log_entries import NO_TIME, Entry, about_model, entries, readable, time_of
from millstream.services.cli.log_files import ProcessLog, processes
from millstream.services.supervisor.log import LogFile

NAMES = ["cpu-0", "gateway-0", "gateway-1", "gpu-0", "redis", "supervisor"]


def local(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


@pytest.mark.parametrize(
    ("line", "time_s"),
    [
        ("2026-11-22 11:00:00,123 INFO a: b", local("2026-11-22T11:00:00.123000")),
        ("2026-11-22T11:00:00.123Z INFO a: b", 1795345200.123),
        ("2026-11-22T11:00:00Z INFO a: b", 1795345200),
        ('{"time": "2026-11-22T11:00:00.123456Z", "message": "x"}', 1795345200.123456),
        ("33:M 22 Nov 2026 11:00:00.123 * Ready", local("2026-11-22T11:00:00.123000")),
        ("  File x, line 3", None),
        ("", None),
        ("{", None),
        ("[" * 10_000, None),
        ('{"a":' * 10_000, None),
        ('{"time": 3}', None),
        ("2026-13-45 11:00:00,123 INFO", None),
        ("33:M 99 Nov 2026 11:00:00.123 * Ready", None),
        ("33:M 22 Xyz 2026 11:00:00.123 * Ready", None),
    ],
)
def test_times_of_lines(line, time_s):
    assert time_of(line) == time_s


@pytest.mark.parametrize(
    ("line", "about"),
    [
        ("x digits y", True),
        ("model 'digits' failed", True),
        ("digits: 3", True),
        ("failed digits.", True),
        ("/v2/models/digits/infer", True),
        ('{"model": "digits"}', True),
        ("digits-2", False),
        ("my-digits", False),
        ("digits.old", False),
        ("digits2", False),
        ("a.digits", False),
    ],
)
def test_entries_about_a_model(line, about):
    assert about_model("digits")(Entry("p", 0, ["head", line])) is about


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        (None, NAMES),
        ("", NAMES),
        ("gateway", ["gateway-0", "gateway-1"]),
        ("gateways", ["gateway-0", "gateway-1"]),
        ("gateway-1", ["gateway-1"]),
        ("worker", ["cpu-0", "gpu-0"]),
        ("gpu", ["gpu-0"]),
        ("gpu-0@web-1", ["gpu-0"]),
        ("redis", ["redis"]),
        ("digits", NAMES),
    ],
)
def test_what_is_shown(what, shown):
    wanted, _ = selection(what, NAMES)
    assert [name for name in NAMES if wanted(name)] == shown


def write(log: LogFile, *lines: str) -> None:
    for line in lines:
        log.write(f"{line}\n".encode())
    log.close()


def shown(folder: Path, count: int, what: str | None = None) -> list[str]:
    names = processes(folder)
    wanted, matches = selection(what, names)
    found = last_entries([ProcessLog(folder, name) for name in names if wanted(name)], matches, count)
    return ["|".join(entry.lines) for entry in found]


def test_the_last_entries_of_all_processes_in_order(tmp_path):
    at = "2026-11-22 11:00:0"
    write(LogFile(tmp_path / "a-0.log"), f"{at}1,000 one", f"{at}3,000 three digits", "  below", f"{at}3,000 four")
    write(LogFile(tmp_path / "b-0.log"), f"{at}2,000 two", f"{at}5,000 five digits")
    said = [
        f"{at}1,000 one",
        f"{at}2,000 two",
        f"{at}3,000 three digits|  below",
        f"{at}3,000 four",
        f"{at}5,000 five digits",
    ]
    assert shown(tmp_path, 100) == said
    for count in range(6):
        assert shown(tmp_path, count) == said[len(said) - count :]
    assert shown(tmp_path, 9, "digits") == [said[2], said[4]]
    assert shown(tmp_path, 1, "digits") == [said[4]]
    assert shown(tmp_path, 9, "a-0") == [said[0], said[2], said[3]]
    assert shown(tmp_path / "none", 9) == []


def test_rotated_files_are_read(tmp_path):
    log = LogFile(tmp_path / "a-0.log", bytes_max=130)
    numbers = [f"2026-11-22 11:00:{number:02},000 entry" for number in range(20)]
    write(log, *numbers)
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["a-0.log", "a-0.log.1", "a-0.log.2", "a-0.log.3"]
    kept = shown(tmp_path, 100)
    assert kept == numbers[-len(kept) :]
    assert len(kept) > 15
    assert processes(tmp_path) == ["a-0"]


def test_following_continues_where_reading_ended_over_rotations(tmp_path):
    log = LogFile(tmp_path / "a-0.log", bytes_max=300)
    write(log, "one", "two")
    reader = ProcessLog(tmp_path, "a-0")
    assert next(reader.lines_backwards()) == "two"
    seen = []
    for number in range(100):
        write(log, f"line {number}")
        seen += reader.new_lines()
    seen += reader.new_lines()
    assert seen == [f"line {number}" for number in range(100)]
    reader.close()


def test_half_a_line_is_shown_when_it_is_whole(tmp_path):
    path = tmp_path / "a-0.log"
    path.write_bytes(b"one\ntw")
    reader = ProcessLog(tmp_path, "a-0")
    assert list(reader.lines_backwards()) == ["one"]
    assert reader.new_lines() == []
    with path.open("ab") as file:
        file.write(b"o\nthr")
        file.flush()
        assert reader.new_lines() == ["two"]
        file.write(b"ee\n")
    assert reader.new_lines() == ["three"]
    path.write_bytes(b"new\n")  # emptied by another program
    assert reader.new_lines() == ["new"]
    path.unlink()
    assert reader.new_lines() == []
    path.write_bytes(b"again\n")
    assert reader.new_lines() == ["again"]
    reader.close()


def test_a_log_that_begins_later_is_followed_from_its_start(tmp_path):
    reader = ProcessLog(tmp_path, "a-0")
    assert list(reader.lines_backwards()) == []
    assert reader.new_lines() == []
    (tmp_path / "a-0.log").write_bytes(b"first\n")
    assert reader.new_lines() == ["first"]
    reader.close()


@given(st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b"")), max_size=30))
def test_lines_backwards_are_the_lines(tmp_path_factory, lines):
    folder = tmp_path_factory.mktemp("backwards")
    (folder / "a-0.log").write_bytes(b"".join(line + b"\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_files, "BLOCK_BYTES", 7)
        read = list(ProcessLog(folder, "a-0").lines_backwards())
    assert read[::-1] == [line.decode(errors="replace") for line in lines]


def test_an_endless_line_and_endless_entries_are_bounded(tmp_path):
    (tmp_path / "a-0.log").write_bytes(b"x" * (5 << 20) + b"\n" + b"y\n" * 5000)
    found = last_entries([ProcessLog(tmp_path, "a-0")], lambda _: True, 100)
    assert max(len(line) for entry in found for line in entry.lines) <= 2 << 20
    assert max(len(entry.lines) for entry in found) <= 1000


def test_entries_in_order_continue_the_entry_above():
    at = "2026-11-22 11:00:00,000 x"
    read = list(entries("a", ["below", at, "  more"], 7.0))
    assert [(entry.time_s, entry.lines, entry.continued) for entry in read] == [
        (7.0, ["below"], True),
        (local("2026-11-22T11:00:00"), [at, "  more"], False),
    ]


def test_json_records_are_readable_and_control_characters_are_escaped():
    record = {
        "time": "2026-11-22T11:00:00.5Z",
        "level": "ERROR",
        "logger": "a.b",
        "message": "x\x1b[31m",
        "request_id": "r",
    }
    line = json.dumps(record | {"exception": "Traceback\n  File"})
    assert readable(Entry("a", local("2026-11-22T11:00:00.500"), [line])) == [
        "2026-11-22 11:00:00,500 ERROR a.b: x\\x1b[31m (request r)",
        "Traceback",
        "  File",
    ]
    assert readable(Entry("a", NO_TIME, ["\x1b]0;title\x07"])) == ["\\x1b]0;title\\x07"]
    assert readable(Entry("a", NO_TIME, ['{"a": 1}'])) == ['{"a": 1}']
