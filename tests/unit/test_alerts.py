"""Every alert has a severity, a section in docs/operations.md, and tests that it fires, does not, and resolves."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from millstream.services.cli.app import full_app
from tests.kit.prometheus import FOLDER, rules

PAGE = Path(__file__).parents[2] / "docs/operations.md"
ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}
_ALERTS_PART = PAGE.read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0]
SECTIONS = dict(pairwise(re.split(r"^### (.+)$", _ALERTS_PART, flags=re.MULTILINE)[1:]))
#: alert -> (minutes, whether it fires) of each test
CASES: dict[str, list[list[tuple[int, bool]]]] = {}


def _collect() -> None:
    for path in sorted((FOLDER / "tests").glob("*.yml")):
        for test in yaml.safe_load(path.read_text())["tests"]:
            by_alert: dict[str, list[tuple[int, bool]]] = {}
            for case in test.get("alert_rule_test", []):
                minutes = int(case["eval_time"].removesuffix("m"))
                by_alert.setdefault(case["alertname"], []).append((minutes, bool(case.get("exp_alerts"))))
            for alert, times in by_alert.items():
                CASES.setdefault(alert, []).append(sorted(times))


_collect()


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_has_a_severity_and_names_its_section(alert: str) -> None:
    rule: dict[str, Any] = ALERTS[alert]
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"{{{{ $externalLabels.runbooks }}}}operations.md#{alert.lower()}"


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    names = re.findall(r"^### (.+)$", _ALERTS_PART, flags=re.MULTILINE)
    assert sorted(names) == sorted(ALERTS)


@pytest.mark.parametrize("alert", ALERTS)
def test_a_section_says_what_it_means_where_to_look_and_what_to_do(alert: str) -> None:
    text = SECTIONS[alert]
    assert "**Means**" in text
    assert "**Look**" in text
    assert re.search(r"\*\*(Do|do)\*\*", text)


@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_is_tested_before_it_fires_while_it_does_and_after(alert: str) -> None:
    phases = [[fires for _, fires in times] for times in CASES[alert]]
    assert any(not seen[0] and True in seen and not seen[-1] for seen in phases)


def commands_of_the_page() -> set[str]:
    """The commands of `millstream` in the page's blocks and spans of code; a span may be wrapped."""
    text = PAGE.read_text()
    spans = re.findall(r"`(millstream [^`]+)`", " ".join(text.split()))
    blocks = re.findall(r"^(millstream [^#\n]+)", text, flags=re.MULTILINE)
    return {command.strip() for command in [*spans, *blocks]}


@pytest.mark.plugins
@pytest.mark.parametrize("command", sorted(commands_of_the_page()))
def test_commands_and_options_of_the_page_exist(command: str) -> None:
    known: Any = typer.main.get_command(full_app())
    _, name, *words = command.split()
    options = {
        option for parameter in known.commands[name].params for option in parameter.opts + parameter.secondary_opts
    }
    assert {word for word in words if word.startswith("-")} <= options


def test_only_alerts_are_tested() -> None:
    assert CASES.keys() == ALERTS.keys()
