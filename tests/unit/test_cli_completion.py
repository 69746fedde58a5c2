"""Completion of models' names: where one is expected, what shells are answered, and servers that answer nonsense."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import typer

from millstream.services.cli import completion
from millstream.services.cli.app import full_app
from millstream.services.cli.completion import expects_model, model_names, read_line
from millstream.services.environment import child_environment
from tests.kit.command_line import ROOT, WAIT_S

GROUP: Any = typer.main.get_command(full_app())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("describe ", True),
        ("describe di", True),
        ("rm -y ", True),
        ("predict --version 3 d", True),
        ("predict --version=3 d", True),
        ("--endpoint http://x:1 predict ", True),
        ("push ", True),
        ("push a ", False),
        ("predict -i ", False),
        ("predict --input fi", False),
        ("predict --inp", False),
        ("predict -", False),
        ("des", False),
        ("", False),
        ("version ", False),
        ("up ", False),
        ("nope ", False),
        ("predict --version ", False),
    ],
)
def test_where_a_model_is_expected(text, expected):
    line = read_line({"_TYPER_COMPLETE_ARGS": f"millstream {text}"}, "zsh")
    assert line is not None
    assert expects_model(*line) is expected


def test_lines_of_shells():
    bash = {"COMP_WORDS": "millstream\nrm\n--yes\ndi", "COMP_CWORD": "3"}
    assert read_line(bash, "bash") == (["rm", "--yes"], "di")
    assert read_line({"COMP_WORDS": "millstream\nrm\n", "COMP_CWORD": "2"}, "bash") == (["rm"], "")
    assert read_line({"_TYPER_COMPLETE_ARGS": "millstream rm di"}, "fish") == (["rm"], "di")
    assert read_line({"_TYPER_COMPLETE_ARGS": "millstream"}, "fish") == ([], "")
    for odd in (
        {},
        {"COMP_WORDS": "a"},
        {"COMP_WORDS": "a", "COMP_CWORD": "x"},
        {"COMP_WORDS": "a 'b", "COMP_CWORD": "1"},
    ):
        assert read_line(odd, "bash") is None


def test_the_tables_are_those_of_the_commands():
    commands = {name: command for name, command in GROUP.commands.items() if name in completion.MODEL_COMMANDS}
    assert set(commands) == {
        name
        for name, command in GROUP.commands.items()
        if command.params and command.params[0].name in {"name", "what"} and name not in {"restart", "doctor"}
    }
    options = [
        parameter
        for command in (GROUP, *commands.values())
        for parameter in command.params
        if parameter.param_type_name == "option"
    ]
    valued = {name for option in options if not option.is_flag for name in option.opts}
    flags = {name for option in options if option.is_flag for name in (*option.opts, *option.secondary_opts)}
    # The program's own --version takes no value, unlike those of commands; with it there is nothing to complete.
    assert valued == completion.VALUE_OPTIONS
    assert valued & flags <= {"--version"}


def served(reply: bytes) -> list[str]:
    """Return the names that are read from a server's reply."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        names = model_names(["--endpoint", f"http://127.0.0.1:{server.getsockname()[1]}"], {})
        thread.join()
    return names


def ok(document: object) -> bytes:
    return b"HTTP/1.0 200 OK\r\n\r\n" + json.dumps(document).encode()


def test_names_are_read_once_and_in_order():
    assert served(ok([{"name": "b"}, {"name": "a-1.x", "version": "1"}, {"name": "a-1.x", "version": "2"}])) == [
        "a-1.x",
        "b",
    ]


@pytest.mark.parametrize(
    "reply",
    [
        b"",
        b"nonsense",
        b"HTTP/1.1 401 Unauthorized\r\n\r\n[]",
        b"HTTP/1.1 200 OK\r\n\r\n{",
        ok({"error": "x"}),
        ok([1]),
        ok([{}]),
        ok(None),
        ok([{"name": 1}]),
        ok([{"name": "$(touch x)"}, {"name": 'a"b'}, {"name": "é"}, {"name": ""}]),
    ],
)
def test_servers_that_answer_nonsense_have_no_names(reply):
    assert served(reply) == []


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "nope", "http://", "http://[::1", "https://127.0.0.1:1", "http://h:x"]
)
def test_without_a_server_there_are_no_names(url):
    assert model_names(["--endpoint", url], {}) == []


def test_the_server_is_that_of_the_home(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "url").write_text("http://127.0.0.1:7\n")
    url = completion._url
    assert url([], {"MILLSTREAM_HOME": str(tmp_path)}) == "http://127.0.0.1:7"
    assert url([], {"MILLSTREAM_HOME": str(tmp_path), "MILLSTREAM_ENDPOINT": "http://x"}) == "http://x"
    assert url(["--endpoint=http://y"], {"MILLSTREAM_ENDPOINT": "http://x"}) == "http://y"
    none = {"MILLSTREAM_HOME": str(tmp_path / "none"), "XDG_CONFIG_HOME": str(tmp_path)}
    assert url([], none) == completion.URL_DEFAULT
    (tmp_path / "millstream").mkdir()
    config = tmp_path / "millstream" / "config.toml"
    config.write_text('default = "a"\n[endpoints.a]\nurl = "http://a"\n[endpoints.b]\nurl = "http://b"\n')
    assert url([], none) == "http://a"
    assert url(["--endpoint", "b"], none) == "http://b"
    assert model_names(["--endpoint", "c"], none) == []
    config.write_text("not toml")
    assert model_names([], none) == []


def installed_in(home: Path) -> subprocess.CompletedProcess[str]:
    """Run --install-completion in a bash; a command behind it keeps bash from being replaced by it."""
    command = f"{sys.executable} -m millstream.services.cli --install-completion; exit $?"
    environment = child_environment({"HOME": str(home)})
    return subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=WAIT_S, check=False
    )


def test_completion_is_installed_in_the_users_home(tmp_path):
    done = installed_in(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    script = tmp_path / ".bash_completions" / "millstream.sh"
    assert script.read_text().endswith("complete -o default -F _millstream_completion millstream")
    assert str(script) in (tmp_path / ".bashrc").read_text()


def test_a_home_that_cannot_be_written_is_one_line():
    done = installed_in(Path("/proc"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: /proc/.bashrc: ")
    assert done.stderr.count("\n") == 1
