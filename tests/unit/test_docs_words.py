"""Pages for readers use the words of docs/architecture.md, and none of those that they replaced."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: The changelog speaks of what was; the table of docs/settings.md is made of the descriptions in the code.
_GLOBS = ("*.md", "docs/*.md", "deploy/*.md", "deploy/*/*.md", "examples/*/*.md")
PAGES = [path for glob in _GLOBS for path in sorted(ROOT.glob(glob)) if path.name != "CHANGELOG.md"]

#: word that the pages do not use -> the word for it
REPLACED = {
    "fast lane": "fast path",
    "canary": "readiness probe",
    "canaries": "readiness probes",
    "keeper": "reconciler",
    "board": "cluster registry",
    "forecast": "estimator",
    "tally": "counter",
    "tallies": "counters",
    "outstanding": "in flight",
    "jail": "sandbox",
    "deaf": "lingering close",
    "whoever": "the caller, the process, …",
    "nobody": "no caller, no process, …",
    "somebody": "a caller, a process, …",
    "everybody": "all callers, all processes, …",
    "of late": "recently",
}
_REPLACED = re.compile(r"\b(" + "|".join(REPLACED) + r")\b", re.IGNORECASE)
LINE_CHARACTERS_MAX = 120


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_page_uses_no_word_that_was_replaced(path: Path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("| `MILLSTREAM_")]
    found = {f"{word}: say {REPLACED[word.lower()]}" for line in lines for word in _REPLACED.findall(line)}
    assert sorted(found) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lines_outside_of_tables_are_short(path: Path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > LINE_CHARACTERS_MAX] == []
