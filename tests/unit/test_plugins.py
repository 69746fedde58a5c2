"""services/plugin: plug-ins of this checkout and of other distributions, in a process of their own each time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from millstream.services.environment import child_environment
from millstream.services.plugin.registry import plugins

ROOT = Path(__file__).parents[2]
RECORD = """
from millstream.services.plugin.plugin import Command, Plugin

PLUGIN = Plugin(
    name="greeter",
    requires=({requires}),
    needs=({needs}),
    commands=(Command(name="greet", panel="Use", function="greeter_plugin:{function}"),),
)


def greet() -> None:
    "Say that a distribution of its own added this command."
    print("hello")
"""


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A folder with an installed distribution that has one plug-in."""
    info = tmp_path / "greeter-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeter\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[millstream.plugins]\ngreeter = greeter_plugin:PLUGIN\n")
    write(tmp_path)
    return tmp_path


def write(folder: Path, requires: str = "", needs: str = "", function: str = "greet") -> None:
    (folder / "greeter_plugin.py").write_text(RECORD.format(requires=requires, needs=needs, function=function))


def millstream(folder: Path, *arguments: str, plugins: str = "all") -> tuple[int, str]:
    environment = child_environment({"PYTHONPATH": str(folder), "MILLSTREAM_PLUGINS": plugins, "COLUMNS": "100"})
    command = [sys.executable, "-m", "millstream.services.cli", *arguments]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_a_distribution_of_its_own_adds_a_command(other: Path) -> None:
    assert millstream(other, "greet") == (0, "hello\n")
    code, page = millstream(other, "--help")
    assert code == 0
    assert "Say that a distribution of its own added this command." in page
    assert "\n  console " in page


@pytest.mark.parametrize(("chosen", "greets", "consoles"), [
    ("all", True, True), ("none", False, False), ("greeter", True, False), ("-greeter", False, True),
    ("-greeter, -console", False, False), (" console , greeter ", True, True),
])  # fmt: skip
def test_the_setting_chooses(other: Path, chosen: str, greets: bool, consoles: bool) -> None:
    _, page = millstream(other, "--help", plugins=chosen)
    assert ("\n  greet " in page, "\n  console " in page) == (greets, consoles)


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ("-gretter", "MILLSTREAM_PLUGINS: there is no plug-in 'gretter'; did you mean 'greeter'? (known: "),
        (
            "console,-greeter",
            "MILLSTREAM_PLUGINS: write either names (openai,fleet), or what to leave out (-openai,-fleet)",
        ),
    ],
)
def test_a_wrong_choice_is_one_line(other: Path, chosen: str, message: str) -> None:
    code, line = millstream(other, "greet", plugins=chosen)
    assert code == 1
    assert line.startswith(f"error: {message}")
    assert line.count("\n") == 1


def test_what_cannot_be_imported_stops_with_its_name_and_what_to_do(other: Path) -> None:
    write(other, function="missing")
    code, line = millstream(other, "greet")
    assert code != 0
    assert "greeter_plugin:missing" in line
    (other / "greeter_plugin.py").write_text("import a_module_that_is_not_there\n")
    code, line = millstream(other, "greet")
    assert code != 0
    assert line.startswith("error: plug-in greeter cannot be loaded (greeter_plugin:PLUGIN: ModuleNotFoundError: ")
    assert line.endswith("mend or uninstall it, or set MILLSTREAM_PLUGINS=-greeter\n")
    assert millstream(other, "models", "--help")[0] == 0, "a command of the core asks no plug-in"


@pytest.mark.parametrize("lacks", [{"requires": "'a_module_that_is_not_there',"}, {"needs": "'a-plug-in',"}])
def test_a_plug_in_that_lacks_something_is_off(other: Path, lacks: dict[str, str]) -> None:
    write(other, **lacks)
    assert "\n  greet " not in millstream(other, "--help")[1]


@pytest.mark.plugins
def test_each_plug_in_of_this_checkout_is_on() -> None:
    assert {"compile", "fleet", "plan", "console"} <= {plugin.name for plugin in plugins()}


@pytest.mark.plugins
def test_a_record_imports_nothing_of_what_it_names() -> None:
    code = """if True:
        import sys
        from millstream.services.plugin.registry import plugins
        before = set(sys.modules)
        found = plugins()
        print(*(set(sys.modules) - before))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name for name in done.stdout.split() if name.startswith("millstream.")}
    records = {name for name in imported if name.endswith(".plugin")}
    assert records
    assert all(any(record.startswith(f"{name}.") for record in records) for name in imported - records), imported


def process(module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", module, *arguments], capture_output=True, text=True, check=False, timeout=60
    )


@pytest.mark.plugins
def test_a_process_of_a_plugin_is_started_by_its_name() -> None:
    unknown = process("millstream.services.plugin", "nothing")
    assert unknown.returncode == 2
    assert unknown.stderr.startswith("usage: python -m millstream.services.plugin NAME")
    assert "controller" in unknown.stderr
    assert process("millstream.services.plugin").returncode == 2
    shown = process("millstream.services.plugin", "controller", "--help")
    assert (shown.returncode, "--life-fd" in shown.stdout) == (0, True)
