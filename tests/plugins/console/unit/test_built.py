"""The console's built files are those of its sources, and small."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.kit.tools import program

CONSOLE = Path(__file__).parents[4] / "plugins" / "console"
SOURCE_LINES_MAX = 6000  # of the web application; `make check` holds the lines of Python
FIRST_VIEW_BYTES_MAX = 300_000


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.needs("npm")
def test_built_files_are_those_of_the_sources(tmp_path: Path) -> None:
    """`make console` makes them anew."""
    web = tmp_path / "web"
    shutil.copytree(CONSOLE / "web", web, ignore=shutil.ignore_patterns("node_modules"))
    for arguments in (("ci", "--no-audit", "--no-fund"), ("run", "build")):
        done = subprocess.run([program("npm"), *arguments], cwd=web, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert _files(tmp_path / "static") == _files(CONSOLE / "static"), "run `make console`"


def test_first_view_is_small() -> None:
    files = _files(CONSOLE / "static")
    assert sum(len(gzip.compress(files[name])) for name in files if not name.endswith(".gz")) < FIRST_VIEW_BYTES_MAX


def test_compressed_files_are_those_beside_them() -> None:
    assets = _files(CONSOLE / "static" / "assets")
    plain = {name: content for name, content in assets.items() if not name.endswith(".gz")}
    assert {name: gzip.decompress(assets[f"{name}.gz"]) for name in plain} == plain


def test_sources_stay_within_what_three_people_own() -> None:
    paths = [path for kind in ("web/src/**/*.ts*", "web/src/**/*.css") for path in CONSOLE.rglob(kind)]
    sources = [path for path in paths if "node_modules" not in path.parts]
    assert sum(len(path.read_text().splitlines()) for path in sources) <= SOURCE_LINES_MAX


def test_page_loads_nothing_of_another_origin() -> None:
    page = (CONSOLE / "static" / "index.html").read_text()
    assert "//" not in page
    assert "<script>" not in page
