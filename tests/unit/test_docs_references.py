"""Pages for readers name tests, files and metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millstream.services.queue.reply_port import PORTS_TRIED

pytestmark = pytest.mark.plugins

ROOT = Path(__file__).parents[2]
_GLOBS = ("*.md", "docs/*.md", "deploy/*.md", "deploy/*/*.md", "examples/*/*.md")
PAGES = [path for glob in _GLOBS for path in sorted(ROOT.glob(glob)) if path.name != "CHANGELOG.md"]
TESTS = {path.relative_to(ROOT / "tests").as_posix() for path in ROOT.glob("tests/**/test_*.py")}

_TEST = re.compile(r"(?<![\w/])(?:tests/)?((?:\w+/)*test_\w+)(?:\.py)?\b")
_FILE = re.compile(r"`((?:gateway|services|workers|deploy|tests)/[\w./-]+)`")
_METRIC = re.compile(r"\bmillstream_[a-z_]+[a-z]\b")


def is_there(name: str) -> bool:
    """Whether a test file has this name, perhaps without its folder."""
    return f"{name}.py" in TESTS or any(path.endswith(f"/{name}.py") for path in TESTS)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_names_tests_and_files_that_are_there(path: Path):
    text = path.read_text()
    assert sorted(name for name in set(_TEST.findall(text)) if not is_there(name)) == []
    assert sorted(name for name in set(_FILE.findall(text)) if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_names_metrics_of_the_catalogue(path: Path):
    catalogue = (ROOT / "services/metrics/catalogue.py").read_text()
    names = {re.sub("_(bucket|sum|count)$", "", name) for name in _METRIC.findall(path.read_text())}
    assert sorted(name for name in names if f'"{name}"' not in catalogue) == []


def test_the_operations_page_names_the_reply_ports_that_a_gateway_may_take():
    page = (ROOT / "docs/operations.md").read_text()
    assert f"port of 8002 to {8002 + PORTS_TRIED - 1}, {PORTS_TRIED} from `MILLSTREAM_REPLY_PORT` on" in page


def test_every_fault_of_the_reliability_page_is_shown_by_a_test():
    page = (ROOT / "docs/reliability.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and line.count(" | ") == 2]
    faults = [row for row in rows if not row.startswith("| what happens")]
    assert len(faults) > 40
    assert [row for row in faults if not _TEST.search(row.rsplit(" | ", 1)[1])] == []
