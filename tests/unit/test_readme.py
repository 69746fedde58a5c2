"""The README and the pages of settings and commands tell the truth, and the README is short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pydantic_core import PydanticUndefined

from millstream.services.cli.app import full_app
from millstream.services.environment import CLIENT_VARIABLES
from millstream.services.settings import MIB, SECRET_FILES, settings_class, variables
from tests.bench import chart

pytestmark = pytest.mark.plugins

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
SETTINGS = (ROOT / "docs/settings.md").read_text()
COMMANDS = (ROOT / "docs/cli.md").read_text()
LINES_MAX = 150
SETTINGS_MAX = 60


def shown(value: object) -> str:
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= MIB and value % MIB == 0:
        return f"{value} ({value // MIB} MiB)"
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings_table() -> str:
    rows = ["| variable | default | what it is |", "|---|---|---|"]
    for name, field in settings_class().model_fields.items():
        assert field.default is not PydanticUndefined
        if variables()[name].startswith("MILLSTREAM_"):
            rows.append(f"| `{variables()[name]}` | {shown(field.default)} | {field.description} |")
    return "\n".join(rows)


def platform_table() -> str:
    rows = ["| variable | what it is |", "|---|---|"]
    for name, field in settings_class().model_fields.items():
        if not variables()[name].startswith("MILLSTREAM_"):
            rows.append(f"| `{variables()[name]}` | {field.description} |")
    return "\n".join(rows)


def test_the_settings_table_is_the_settings():
    assert settings_table() in SETTINGS, "the table of docs/settings.md should be:\n" + settings_table()
    assert platform_table() in SETTINGS, "the table of docs/settings.md should be:\n" + platform_table()


def test_there_are_no_more_settings_than_a_person_reads():
    assert settings_table().count("\n") - 1 <= SETTINGS_MAX


def test_every_command_is_in_the_tour():
    commands = {command.callback.__name__.rstrip("_") for command in full_app().registered_commands if command.callback}
    assert commands >= {"up", "restart", "push", "models", "describe", "predict", "rm", "bench", "demo", "version"}
    missing = {name for name in commands - {"demo", "version"} if f"millstream {name}" not in COMMANDS}
    assert not missing


def test_a_person_decides_in_a_minute():
    assert len(README.splitlines()) <= LINES_MAX


def test_the_chart_is_of_the_page_of_benchmarks():
    page = (ROOT / "docs/benchmarks.md").read_text()
    assert (ROOT / "docs/benchmarks.svg").read_text() == chart.plot_of(page), "python -m tests.bench.chart"


def test_every_linked_file_is_there():
    links = [link for link in re.findall(r"\]\(([^)]+)\)", README) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_variable_that_is_written_about_is_a_setting():
    texts = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "docker-compose.yml", *ROOT.glob("deploy/**/*")]
    known = {variables()[name] for name in settings_class().model_fields} | SECRET_FILES | set(CLIENT_VARIABLES)
    named = {
        (name, path.name)
        for path in texts
        if path.is_file() and path.suffix != ".pyc"
        for name in re.findall(r"MILLSTREAM_[A-Z0-9_]*[A-Z0-9]", path.read_text(errors="replace"))
    }
    assert len(named) > 50
    assert sorted((name, path) for name, path in named if name not in known) == []
