"""Tables and details of the command line: as wide as the terminal, whole names, nothing lost."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from millstream.client.cli.terminal import escape, show_detail, show_rows

COLUMNS = ("MODEL", "VERSION", "STATE", "ROLE")


def shown(width: int, show: Callable[..., None], *arguments: Any, **options: Any) -> list[str]:
    file = io.StringIO()
    show(Console(file=file, width=width, force_terminal=True, color_system=None, soft_wrap=True), *arguments, **options)
    return file.getvalue().splitlines()


def test_a_table_that_fits():
    rows = [["a", "1", "[green]ready[/]", "serving"], ["a", "12", "failed", ""], ["b", "1", "ready", ""]]
    assert shown(40, show_rows, COLUMNS, rows, right=("VERSION",)) == [
        "MODEL   VERSION   STATE    ROLE",
        "a             1   ready    serving",
        "             12   failed",
        "b             1   ready",
    ]


def test_a_table_that_does_not_fit_is_blocks():
    rows = [["a" * 30, "1", "[green]ready[/]", "serving"], ["b", "-", "failed", ""]]
    assert shown(40, show_rows, COLUMNS, rows) == [
        "a" * 30,
        "  version  1",
        "  state    ready",
        "  role     serving",
        "",
        "b",
        "  state    failed",
    ]


def test_a_table_without_rows_is_its_titles():
    assert shown(40, show_rows, COLUMNS, []) == ["MODEL   VERSION   STATE   ROLE"]


@given(
    st.integers(20, 120), st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1), max_size=5)
)
@example(40, ["\\[", "\\\\[a", "[b]\\[/b]"])
def test_cells_are_whole_in_every_width(width, names):
    rows = [[escape(f"{name}{number}"), "1", "ready", "serving"] for number, name in enumerate(names)]
    said = shown(width, show_rows, COLUMNS, rows)
    assert [
        name for number, name in enumerate(names) if not any(line.startswith(f"{name}{number}") for line in said)
    ] == []


@pytest.mark.parametrize("width", [30, 40, 120])
def test_details_wrap_below_their_text(width):
    text = ", ".join(f"input{number} FP32 [-1, 3]" for number in range(6))
    lines = shown(width, show_detail, "  inputs   ", escape(text))
    assert lines[0].startswith("  inputs   input0")
    assert all(line.startswith(" " * 11) for line in lines[1:])
    assert max(map(len, lines)) <= width
    assert " ".join(line[11:] for line in lines) == text


def test_details_on_a_very_narrow_terminal_are_left_to_it():
    assert shown(20, show_detail, "  inputs   ", "a b c " * 9)[0].endswith("a b c")
