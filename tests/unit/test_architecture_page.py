"""docs/architecture.md and docs/queue.md name files, links and Redis keys that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.plugins

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
QUEUE = (ROOT / "docs/queue.md").read_text()
_FILE = re.compile(r"(?<![\w/.<>])(?:[\w.-]+/)*[\w.-]+\.(?:py|lua)\b")
_FOLDER = re.compile(r"`((?:\.?[\w-]+/)+)`")
_LINK = re.compile(r"\]\(([^)#]+)\)")
_KEY = re.compile(r"ms:(\d+):\{millstream(?::cpu)?\}:([a-z]+)")


def test_every_file_that_the_page_names_is_there():
    files = {file for page in (PAGE, QUEUE) for file in (*_FILE.findall(page), *_FOLDER.findall(page))}
    assert len(files) > 100
    assert sorted(file for file in files if not (ROOT / file).exists()) == []


def test_every_link_leads_to_a_file():
    links = [link for link in _LINK.findall(PAGE) if "://" not in link]
    assert links
    assert [link for link in links if not (ROOT / "docs" / link).exists()] == []


def test_each_question_is_answered_with_a_file_first():
    section = PAGE.split("## Where is it decided")[1].split("\n## ")[0]
    answers = re.findall(r"^\| [^|]+\? \| `([\w/.-]+)`", section, re.MULTILINE)
    assert len(answers) >= 12
    assert [answer for answer in answers if not (ROOT / answer).exists()] == []


def test_every_redis_key_of_the_page_is_one_of_the_code():
    keys = (ROOT / "services/queue/keys.py").read_text()
    named = set(_KEY.findall(QUEUE))
    assert len(named) > 10
    assert re.search(r"^PROTOCOL = (\d+)$", keys, re.MULTILINE)[1] in {number for number, _ in named}  # type: ignore[index]
    prelude = (ROOT / "services/queue/scripts/_prelude.lua").read_text()  # keys that only scripts use
    assert sorted(key for _, key in named if f'b"{key}' not in keys and f"PREFIX .. '{key}'" not in prelude) == []
