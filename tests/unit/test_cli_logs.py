"""`millstream logs`: lines of all processes in order of time, files read from their ends, followed over rotations."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.services.cli.commands import logs
from millstream.services.cli.commands.logs import Line, Tail, processes, selection
from millstream.services.supervisor.log import LogFile

NAMES = ["cpu-0", "gateway-0", "gateway-0-access", "gateway-1", "gpu-0", "redis", "supervisor"]
AT = "2026-11-22 11:00:0"


@pytest.mark.parametrize(
    ("what", "shown"),
    [
        (None, [name for name in NAMES if name != "gateway-0-access"]),
        ("", [name for name in NAMES if name != "gateway-0-access"]),
        ("gateway", ["gateway-0", "gateway-1"]),
        ("gateway-1", ["gateway-1"]),
        ("worker", ["cpu-0", "gpu-0"]),
        ("access", ["gateway-0-access"]),
        ("gateway-0-access", ["gateway-0-access"]),
        ("gpu", ["gpu-0"]),
        ("gpu-0@web-1", ["gpu-0"]),
        ("redis", ["redis"]),
        ("digits", []),
    ],
)
def test_what_is_shown(what: str | None, shown: list[str]) -> None:
    assert [name for name in NAMES if selection(what)(name)] == shown


def write(log: LogFile, *lines: str) -> None:
    for line in lines:
        log.write(f"{line}\n".encode())
    log.close()


def last(folder: Path, name: str, count: int) -> list[Line]:
    with contextlib.closing(Tail(folder, name)) as tail:
        return tail.last(count)


def shown(capsys: pytest.CaptureFixture[str], folder: Path, count: int, *, json_output: bool = False) -> list[str]:
    """What the command prints of a folder of logs."""
    lines = sorted((line for name in processes(folder) for line in last(folder, name, count)), key=lambda one: one.time)
    logs._printer(processes(folder), json_output=json_output)(lines[max(0, len(lines) - count) :])
    return capsys.readouterr().out.splitlines()


def test_the_last_lines_of_all_processes_in_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(LogFile(tmp_path / "a-0.log"), f"{AT}1,000 one", f"{AT}3,000 three", "  below", f"{AT}3,000 four")
    write(
        LogFile(tmp_path / "bb-0.log"), f"{AT}2,000 two\x1b[2J", f'{{"time": "{AT[:10]}T{AT[11:]}5.5Z", "message": ""}}'
    )
    said = [
        f"a-0   {AT}1,000 one",
        f"bb-0  {AT}2,000 two\\x1b[2J",
        f"a-0   {AT}3,000 three",
        "a-0     below",
        f"a-0   {AT}3,000 four",
    ]
    whole = shown(capsys, tmp_path, 100)
    assert whole[:-1] == said
    for count in range(7):
        assert shown(capsys, tmp_path, count) == whole[6 - count :]
    assert json.loads(shown(capsys, tmp_path, 6, json_output=True)[1]) == {
        "process": "bb-0",
        "text": f"{AT}2,000 two\x1b[2J",
    }
    assert processes(tmp_path / "none") == []


def test_rotated_files_are_read(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a-0.log", bytes_max=130)
    numbers = [f"2026-11-22 11:00:{number:02},000 entry" for number in range(20)]
    write(log, *numbers)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-0.log", "a-0.log.1", "a-0.log.2", "a-0.log.3"]
    kept = [line.text for line in last(tmp_path, "a-0", 100)]
    assert kept == numbers[-len(kept) :]
    assert len(kept) > 15
    assert processes(tmp_path) == ["a-0"]


def test_following_continues_where_reading_ended_over_rotations(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "a-0.log", bytes_max=300)
    write(log, "one", "two")
    tail = Tail(tmp_path, "a-0")
    assert [line.text for line in tail.last(1)] == ["two"]
    seen = []
    for number in range(100):
        write(log, f"line {number}")
        seen += tail.new()
    seen += tail.new()
    assert [line.text for line in seen] == [f"line {number}" for number in range(100)]
    tail.close()


def test_half_a_line_is_shown_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a-0.log"
    path.write_bytes(b"one\ntw")
    tail = Tail(tmp_path, "a-0")

    def new() -> list[str]:
        return [line.text for line in tail.new()]

    assert [line.text for line in tail.last(9)] == ["one"]
    assert new() == []
    with path.open("ab") as file:
        file.write(b"o\nthr")
        file.flush()
        assert new() == ["two"]
        file.write(b"ee\n")
    assert new() == ["three"]
    path.write_bytes(b"new\n")  # emptied by another program
    assert new() == ["new"]
    path.unlink()
    assert new() == []
    path.write_bytes(b"again\n")
    assert new() == ["again"]
    tail.close()


def test_a_log_that_begins_later_is_followed_from_its_start(tmp_path: Path) -> None:
    tail = Tail(tmp_path, "a-0")
    assert tail.last(9) == tail.new() == []
    (tmp_path / "a-0.log").write_bytes(b"first\n")
    assert [line.text for line in tail.new()] == ["first"]
    tail.close()


@given(
    st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b"").replace(b"\r", b"")), max_size=30),
    st.integers(0, 40),
)
def test_the_end_of_a_file_is_its_last_lines(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], count: int
) -> None:
    folder = tmp_path_factory.mktemp("ends")
    (folder / "a-0.log").write_bytes(b"".join(line + b"\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "BLOCK_BYTES", 7)
        read = [line.text for line in last(folder, "a-0", count)]
    assert read == [line.decode(errors="replace") for line in lines][max(0, len(lines) - count) :]
