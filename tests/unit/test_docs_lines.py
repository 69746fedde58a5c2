"""Pages for readers have short lines."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: the changelog speaks of what was
_GLOBS = ("*.md", "docs/*.md", "deploy/*.md", "deploy/*/*.md", "examples/*/*.md")
PAGES = [path for glob in _GLOBS for path in sorted(ROOT.glob(glob)) if path.name != "CHANGELOG.md"]

LINE_CHARACTERS_MAX = 120


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_lines_outside_of_tables_are_short(path: Path):
    lines = [line for line in path.read_text().splitlines() if not line.startswith("|")]
    assert [line for line in lines if len(line) > LINE_CHARACTERS_MAX] == []
