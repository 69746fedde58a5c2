"""Lines whose reader stops reading are dropped and counted; what it reads are whole lines."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator

import pytest

from millstream.services.process.logs import BoundedWriter

LINE = b"x" * 99 + b"\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def writer(fd: int) -> BoundedWriter:
    return BoundedWriter(fd, lambda count: b"%d dropped\n" % count)


def read_all(fd: int) -> bytes:
    """Return what can be read now."""
    data = b""
    while select.select([fd], [], [], 0)[0]:
        data += os.read(fd, 1 << 16)
    return data


def test_lines_of_a_reader_that_reads_are_written(pipe: tuple[int, int]) -> None:
    readable, writable = pipe
    lines = writer(writable)
    long = b"y" * 3 * select.PIPE_BUF + b"\n"
    lines.write(LINE)
    lines.write(long)
    assert read_all(readable) == LINE + long


def test_a_reader_that_stops_costs_lines_and_no_time(pipe: tuple[int, int]) -> None:
    readable, writable = pipe
    lines = writer(writable)
    for _ in range(2000):
        lines.write(LINE)
    read = read_all(readable)
    kept = read.count(LINE)
    assert read == kept * LINE
    lines.write(b"last\n")
    assert read_all(readable) == b"%d dropped\nlast\n" % (2000 - kept)


def test_a_line_that_was_cut_is_ended(pipe: tuple[int, int]) -> None:
    readable, writable = pipe
    lines = writer(writable)
    lines.write(b"a" * (1 << 18))  # more than the pipe takes
    lines.write(LINE)
    read = read_all(readable)
    assert set(read) == {ord("a")}
    lines.write(LINE)
    assert read_all(readable) == b"\n2 dropped\n" + LINE


def test_a_reader_that_is_gone_is_ignored(pipe: tuple[int, int]) -> None:
    other_readable, other_writable = os.pipe()
    lines = writer(other_writable)
    os.close(other_readable)
    lines.write(LINE)
    os.close(other_writable)
    lines.write(LINE)


def test_a_file_takes_everything(tmp_path) -> None:
    with (tmp_path / "log").open("wb") as file:
        lines = writer(file.fileno())
        for _ in range(2000):
            lines.write(LINE)
    assert (tmp_path / "log").read_bytes() == 2000 * LINE
