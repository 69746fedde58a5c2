"""The pages of --help: whole names of options, examples to copy for each command; colour only where it is wanted."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import typer

from millstream.services.cli.app import app_for, full_app
from millstream.services.environment import child_environment
from millstream.services.version import VERSION
from tests.kit.command_line import ROOT, WAIT_S, in_terminal

MILLSTREAM = [sys.executable, "-m", "millstream.services.cli"]
GROUP: Any = typer.main.get_command(full_app())
COMMANDS = sorted(GROUP.commands)


def page_of(command: Any, monkeypatch: pytest.MonkeyPatch, columns: int) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    parent = GROUP.make_context("millstream", [], resilient_parsing=True)
    with command.make_context(command.name, [], parent=parent, resilient_parsing=True) as context:
        return str(context.get_help())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_first_argument_that_names_a_command_builds_that_command_alone(monkeypatch, name):
    alone: Any = typer.main.get_command(app_for([name, "--json"]))
    assert list(alone.commands) == [name]
    assert page_of(alone.commands[name], monkeypatch, 80) == page_of(GROUP.commands[name], monkeypatch, 80)


@pytest.mark.parametrize("arguments", [[], ["--help"], ["serv"], ["--endpoint", "models", "push"]], ids=str)
def test_without_such_an_argument_all_commands_are_known(arguments):
    group: Any = typer.main.get_command(app_for(arguments))
    assert sorted(group.commands) == COMMANDS


@pytest.mark.parametrize("columns", [40, 80, 120])
@pytest.mark.parametrize("name", COMMANDS)
def test_pages_cut_no_name_and_have_examples_to_copy(monkeypatch, name, columns):
    command = GROUP.commands[name]
    page, _, examples = page_of(command, monkeypatch, columns).partition("\nExamples:\n")
    assert examples.startswith(f"  millstream {name}") or "millstream " + name in examples
    if columns >= 80:
        assert max(map(len, page.splitlines())) <= columns
    for parameter in command.params:
        if parameter.param_type_name == "option" and not parameter.hidden:
            assert all(option in page.split() or f"{option}," in page.split() for option in parameter.opts)


def test_every_command_has_json():
    for name in COMMANDS:
        assert "--json" in [option for parameter in GROUP.commands[name].params for option in parameter.opts], name


def test_the_program_lists_every_command_with_a_whole_sentence(monkeypatch):
    page = page_of(GROUP, monkeypatch, 80)
    listed = " ".join(page.split())
    for name, command in GROUP.commands.items():
        assert f"\n  {name} " in page
        assert (command.help or "").partition("\n")[0] in listed
    assert "\nStart here:\n  millstream up\n" in page


def test_defaults_are_told(monkeypatch):
    page = " ".join(page_of(GROUP.commands["push"], monkeypatch, 120).split())
    assert "[default: wait]" in page
    assert "[default: 16;" in " ".join(page_of(GROUP.commands["bench"], monkeypatch, 120).split())


@pytest.mark.parametrize("arguments", [["nope"], ["doctor"]])
def test_colour_only_on_a_terminal_that_has_it(arguments):
    assert "\x1b[" in in_terminal([*MILLSTREAM, *arguments], 80)[1]
    for environment in ({"NO_COLOR": "1"}, {"TERM": "dumb"}, {"TERM": "dumb", "FORCE_COLOR": "1"}):
        assert "\x1b" not in in_terminal([*MILLSTREAM, *arguments], 80, environment)[1], environment
    piped = subprocess.run(
        [*MILLSTREAM, *arguments],
        cwd=ROOT,
        env=child_environment({"TERM": "xterm-256color", "GITHUB_ACTIONS": "true", "FORCE_COLOR": "1"}),
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert "\x1b" not in piped.stdout + piped.stderr


@pytest.mark.parametrize("argument", ["--version", "-V"])
def test_the_version_is_an_option_too(argument):
    code, said = in_terminal([*MILLSTREAM, argument], 40)
    assert code == 0
    assert said.startswith("millstream ")


def test_an_image_says_which_commit_it_was_built_from():
    environment = child_environment({"IMAGE_REVISION": "0123456789abcdef0123"})
    asked = [sys.executable, "-m", "millstream.services.cli", "version"]
    plain = subprocess.run(asked, env=environment, capture_output=True, text=True, check=True)
    assert plain.stdout == f"millstream {VERSION} (0123456789ab)\n"
    parsed = subprocess.run([*asked, "--json"], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(parsed.stdout)["revision"] == "0123456789abcdef0123"
