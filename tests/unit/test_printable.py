"""Names that a stranger chose, on a terminal: whatever a model calls its tensors, the terminal obeys nothing in it."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from millstream.client.cli.terminal import escape
from millstream.services.process.printable import printable
from millstream.services.supervisor.log import Alerts


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, größer, ☃, 数", "plain, größer, ☃, 数"),
        ("\x1b[2J\x1b]0;owned\a", r"\x1b[2J\x1b]0;owned\x07"),
        ("x\r\nready http://evil", r"x\r\nready http://evil"),
        ("\u202egpj.exe\x9b31m\x00", r"\u202egpj.exe\x9b31m\x00"),
    ],
)
def test_what_a_terminal_would_obey_is_written_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown
    assert printable(shown) == shown


def test_the_console_obeys_nothing_in_a_name() -> None:
    page = io.StringIO()
    name = escape("[red]x\x1b[2J\n")
    Console(file=page, force_terminal=True, color_system=None, width=200).print(f"inputs {name}")
    assert page.getvalue() == "inputs [red]x\\x1b[2J\\n\n"


def test_a_line_of_a_child_on_the_terminal() -> None:
    assert Alerts().line_to_show("ERROR: node '\x1b[31m\rforged'\tx", 0) == "ERROR: node '\\x1b[31m\\rforged' x"
